"""What all tests share."""

import signal
import threading

# A run that was started in the background ignores Ctrl-C, and so would every process that it starts: tests of how
# Ctrl-C ends them would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
