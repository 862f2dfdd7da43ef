"""The daemon's decisions, without a socket, a clock or a log. `core.Core` is the only door; `api` says what passes it.

To change ...                                        open
  who may register, attach, come and go                people, engines
  what a lookup answers, how leases live               lookups, leases
  which keys of a step are taken, what the plan says   intake
  what a step's ends, writes and revokes bring about   steps
  how a job moves on and what that frees               jobs (the table), ending (what is done)
  how long it may take                                 ending, pace
  what is left of an earlier daemon                    recovery, header (of the table's file)
  reset, drain                                         reset, drain
  which blocks may not be reused unseen                fence
  what is evicted, where keys are found                pool, index
  what a slot's record says                            slots
  who shares with whom                                 namespaces
  what must add up                                     status
"""
