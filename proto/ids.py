"""The numbers that name things. Each is given by one party and never reused by it.

    who gives it          id             what it names
    daemon (random)       BootId         one start of the daemon
    daemon                JobId          one accepted transfer; its high bits are the boot's low bits
    daemon                LeaseId        one pin of a lookup's hits
    client                Ticket         the client's own name for a transfer, within its process
    client                RequestId      one attempt of one request (a preempted request comes back as a new one)
    client                LookupId       one lookup on one link
    connecting side       LinkId         one connection
    supervisor (random)   WorkerId       one worker process: its incarnation
    daemon (random)       Incarnation    one registration of an engine with one daemon boot

All are unsigned 64-bit; 0 means "none".
"""

from typing import Final, NewType

BootId = NewType("BootId", int)
JobId = NewType("JobId", int)
LeaseId = NewType("LeaseId", int)
Ticket = NewType("Ticket", int)
RequestId = NewType("RequestId", int)
LookupId = NewType("LookupId", int)
LinkId = NewType("LinkId", int)
WorkerId = NewType("WorkerId", int)
Incarnation = NewType("Incarnation", int)

U64_MAX: Final = (1 << 64) - 1
U32_MAX: Final = (1 << 32) - 1

# 24 bits of boot, 40 bits of counter: a daemon at 100,000 jobs a second counts for 127 days, and a
# job id of an earlier boot is told from a present one by looking at it.
JOB_COUNTER_BITS: Final = 40
JOB_COUNTER_MAX: Final = (1 << JOB_COUNTER_BITS) - 1


def make_job_id(boot: BootId, counter: int) -> JobId:
    """The id of job number `counter` (1, 2, ...) of daemon boot `boot`."""
    if not 0 < counter <= JOB_COUNTER_MAX:
        raise OverflowError(f"job counter {counter} is outside 1..{JOB_COUNTER_MAX}; restart the daemon")
    return JobId(((boot & 0xFF_FFFF) << JOB_COUNTER_BITS) | counter)


def job_is_of_boot(job: JobId, boot: BootId) -> bool:
    """Whether `job` was given by `boot` (24 bits of evidence: enough to drop a stale report)."""
    return job >> JOB_COUNTER_BITS == boot & 0xFF_FFFF
