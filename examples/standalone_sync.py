"""A trainer and two workers without a collector: `python examples/standalone_sync.py [spawn]`."""

import multiprocessing
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from sync import SharedMemWeightSyncScheme


def work(scheme: SharedMemWeightSyncScheme, worker_idx: int) -> None:
    policy = torch.nn.Linear(4, 2)
    scheme.init_on_receiver(model=policy, worker_idx=worker_idx)
    scheme.connect(background=False)
    while scheme.version < 5:
        scheme.receive(timeout=1.0)  # between two uses of the policy
        action = policy(torch.ones(4)).tolist()
        print(f"worker {worker_idx}, version {scheme.version}: {action}", flush=True)


if __name__ == "__main__":
    ctx = multiprocessing.get_context(sys.argv[1] if len(sys.argv) > 1 else "spawn")
    policy = torch.nn.Linear(4, 2)
    with SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model=policy, devices=["cpu", "cpu"], ctx=ctx)
        workers = [ctx.Process(target=work, args=(scheme, i)) for i in range(2)]
        for worker in workers:
            worker.start()
        scheme.connect()
        for _ in range(5):
            torch.nn.init.constant_(policy.weight, scheme.version + 1)  # a training step
            scheme.send()
        for worker in workers:
            worker.join()
        print("acknowledged:", scheme.acknowledged)
