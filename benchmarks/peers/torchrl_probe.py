"""Count how often torchrl breaks the promises of tests/promises, by running it.

Run from the repository root, in the peers' environment (`make peers`):

    .venv-peers/bin/python -m benchmarks.peers.torchrl_probe --scheme shared --seconds 4 --readers 3

Weights that all hold one number, the version, make any mixture of versions visible. The phases:

    blocking, nonblocking         a bare scheme, sync=True and sync=False: torn policy calls while
                                  the trainer publishes as fast as it can, un-sent changes that
                                  reach a reader, `worker_ids` that reach somebody else
    collector, collector_in_place MultiAsyncCollector with track_policy_version on CartPole: torn
                                  frames and wrong stamps, publishing new weights after every batch
                                  or, as training loops do, stepping the collector's own policy

Each phase is a process group of its own with a deadline, so that a torchrl that hangs is reported
as `"state": "hang"` with whatever was found before. One JSON object on stdout, a table on stderr.
`--trainer private` gives the bare schemes memory that is not the trainer's, which torchrl does only
where it is told to.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from typing import Any

SCHEME_PHASES = {"blocking": [], "nonblocking": ["--nonblocking"]}
COLLECTOR_PHASES = {"collector": [], "collector_in_place": ["--in-place"]}
START_AND_END_S = 90.0  # imports, spawning, connecting, draining; generous for a busy machine
KILL_AFTER_S = 5.0
LOG_LINES = 15


def phase_command(phase: str, args: argparse.Namespace) -> list[str]:
    """Return the command line of one phase."""
    common = ["--scheme", args.scheme, "--seconds", str(args.seconds)]
    common += ["--readers", str(args.readers), "--width", str(args.width)]
    if phase in SCHEME_PHASES:
        module, special = "torchrl_probe_scheme", SCHEME_PHASES[phase]
        common += ["--trainer", args.trainer]
    else:
        module, special = "torchrl_probe_collector", COLLECTOR_PHASES[phase]
    return [sys.executable, "-m", f"benchmarks.peers.{module}", *common, *special]


def run_phase(phase: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one phase to its end or its deadline; return its findings and its state."""
    timeout_s = args.seconds + START_AND_END_S
    child = subprocess.Popen(
        phase_command(phase, args),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, log = child.communicate(timeout=timeout_s)
        state = "done" if child.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        state = "hang"
        output, log = end_phase(child)
    finally:
        signal_group(child.pid, signal.SIGKILL)
    findings: dict[str, Any] = {"state": state}
    for line in output.splitlines():
        findings.update(json.loads(line))
    if state != "done":
        findings["timeout_s"] = timeout_s
        findings["log"] = log.splitlines()[-LOG_LINES:]
    return findings


def end_phase(child: subprocess.Popen[str]) -> tuple[str, str]:
    """End a phase that hangs, and return what it had written.

    SIGTERM comes first because Python's resource tracker outlives it and unlinks the semaphores.
    """
    child.kill()
    signal_group(child.pid, signal.SIGTERM)
    try:
        return child.communicate(timeout=KILL_AFTER_S)
    except subprocess.TimeoutExpired:
        signal_group(child.pid, signal.SIGKILL)
        return child.communicate()


def signal_group(group: int, signal_number: int) -> None:
    """Signal whatever is left of a phase's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal_number)


def share(count: int, total: int) -> str:
    """Write a count out of a total, with its percentage."""
    return f"{count} of {total} ({100 * count / max(total, 1):.2f} %)"


def table_rows(phase: str, found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the lines of the human table for one phase."""
    rows = [("state", found["state"])]
    if "version_stamp" in found:
        rows.append(("version stamp of the scheme", found["version_stamp"]))
    if "aliasing" in found:
        saw = found["aliasing"]["readers_that_saw_an_unsent_step"]
        rows.append(("readers that saw an un-sent step", str(saw)))
    if "worker_ids" in found:
        ids = found["worker_ids"]
        rows.append(("worker_ids=[0]: other readers changed", str(ids["other_readers_changed"])))
        rows.append(
            ("  ... the trainer's own weights too", str(ids["trainers_own_weights_changed"]))
        )
    for name in ("storm_copied_weights", "storm_own_weights"):
        if name in found:
            storm = found[name]
            title = name.removeprefix("storm_").replace("_", " ")
            rows.append((f"{title}: torn calls", share(storm["torn"], storm["calls"])))
            rows.append((f"{title}: sends/s", str(storm["sends_per_s"])))
            delivered = str(storm["next_send_delivered_after_s"])
            rows.append((f"{title}: next send arrives after (s)", delivered))
    if "collector" in found:
        counts = found["collector"]
        rows.append(("torn frames", share(counts["torn_frames"], counts["frames"])))
        rows.append(("wrong stamps", share(counts["wrong_stamps"], counts["frames"])))
        uniform, several = counts["batches_of_one_version"], counts["of_those_stamped_with_several"]
        rows.append(("one-version batches stamped with several", share(several, uniform)))
        rows.append(("update_policy_weights_ mean (ms)", str(counts["update_ms_mean"])))
    return [(phase, label, value) for label, value in rows]


def main() -> None:
    """Run the chosen phases one after the other; print the object and the table."""
    phases = [*SCHEME_PHASES, *COLLECTOR_PHASES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", choices=["shared", "multiprocess"], required=True)
    parser.add_argument("--trainer", choices=["shared", "private"], default="shared")
    parser.add_argument("--seconds", type=float, default=4.0, help="of publishing, per phase")
    parser.add_argument("--readers", type=int, default=3)
    parser.add_argument("--width", type=int, default=64, help="the largest tensors are width^2")
    parser.add_argument("--phases", nargs="+", choices=phases, default=phases)
    args = parser.parse_args()
    results: dict[str, Any] = {"torchrl": importlib.metadata.version("torchrl"), **vars(args)}
    results["phases"] = {}
    for phase in args.phases:
        results["phases"][phase] = run_phase(phase, args)
        for name, label, value in table_rows(phase, results["phases"][phase]):
            print(f"{name:20} {label:48} {value}", file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
