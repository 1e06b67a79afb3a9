"""The process in which one contestant of the training benchmark trains.

`benchmarks/train.py` starts one for each training. One JSON line in, one line out; the libraries'
own output goes to stderr.

    {"cmd": "train", "training": {...}, "options": {...}}
        -> {"frames": 300032, "seconds": 12.3, "final_return": 344.1, "final_episodes": 90}

What goes wrong is `{"error": "..."}`, and what cannot take part is `{"left_out": "why"}`. The
driver bounds every wait and ends the whole process group, so nothing here needs a timeout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.collect_host import LeftOut, claim_stdout, end_with_parent
from benchmarks.train_case import Trained, Training

Train = Callable[[Training, dict[str, Any]], Trained]


def serve(train: Train) -> None:
    """Answer each line of stdin with one line, until the end of the input."""
    end_with_parent()
    reply = claim_stdout()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            trained = train(Training(**request["training"]), request["options"])
            answer = trained.message()
        except LeftOut as why:
            answer = {"left_out": str(why)}
        except Exception as error:  # noqa: BLE001  (every failure goes to the driver)
            first_line = (str(error).splitlines() or [""])[0]
            answer = {"error": f"{type(error).__name__}: {first_line}"}
        reply(answer)
