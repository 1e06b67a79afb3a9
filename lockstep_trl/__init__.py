"""Exact lag, recording and replay for TRL's `AsyncGRPOTrainer`, through its two public protocols.

    AsyncGRPOTrainer                  Transfer                        Worker
    ----------------                  --------                        ------
    weight sync: send_weights  --->   a version, through lag,  --->   loads it, writes the answers
                                      tear and wire format            of a prompt, scores them
    rollout_queue.get          <-----------------------------------   the next answer, stamped

`LockstepRollouts` makes and joins the parts; docs/trl.md has the page for users.
"""

from lockstep_trl.rollouts import LockstepRollouts as LockstepRollouts
from lockstep_trl.run import RunRecord as RunRecord
from sync import Lag as Lag
from sync import Tear as Tear
