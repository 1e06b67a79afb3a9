"""The points of a run at which chaos strikes, by phase, and how many times each is passed."""

from __future__ import annotations

# In the trainer: (what is called, up to which call of it may be chosen).
TRAINER: dict[str, list[tuple[str, int]]] = {
    "imports": [
        ("harness.registry", 1),
        ("harness.config", 1),
        ("omegaconf", 1),
        ("torch", 1),
        ("tensordict", 1),
        ("gymnasium", 1),
        ("harness.run.run_lifetime", 1),
        ("harness.run.provenance", 1),
    ],
    "planning": [
        ("harness.config.plan:plan_from", 1),
        ("harness.run.run_lifetime:execute", 1),
        ("harness.run.build:make_learner", 1),
    ],
    "start-up": [
        ("harness.run.run_lifetime:open_directory", 1),
        ("harness.run_directory:RunDir._claim", 1),
        ("harness.files:write_json", 3),
        ("harness.logging.run_log:run_log", 1),
        ("harness.logging:make_loggers", 1),
        ("harness.run.build:make_scheme", 1),
        ("harness.run.build:make_collector", 1),
        ("harness.run.training_loop:TrainingLoop.run", 1),
    ],
    "starting workers": [
        ("collectors.workers.process_lifetime:context", 1),
        ("collectors.workers.pool:WorkerPool.start", 1),
        ("collectors.workers.process_handle:ProcessHandle.start", 2),
        ("collectors.workers.pool:WorkerPool._await_all", 1),
    ],
    "connecting": [
        ("collectors.workers.pool:WorkerPool._connect", 1),
        ("sync.scheme:WeightSyncScheme.connect", 1),
    ],
    "collecting": [("harness.run.training_loop:TrainingLoop.collect", 15)],
    "updating": [
        ("harness.run.training_loop:TrainingLoop.update", 15),
        ("harness.algorithms.interface:Learner.learn", 15),
    ],
    "publishing": [
        ("harness.run.training_loop:TrainingLoop.publish", 15),
        ("collectors.base:BaseCollector.update_policy_weights_", 15),
    ],
    "logging": [
        ("harness.run.training_loop:TrainingLoop.log_if_due", 15),
        ("harness.logging:JsonlLogger.log", 15),
        ("harness.run.training_loop:TrainingLoop.checkpoint_if_due", 15),
    ],
    "evaluating": [
        ("harness.run.training_loop:TrainingLoop.evaluate", 3),
        ("harness.environments.evaluate:play", 3),
    ],
    "saving": [
        ("harness.run.training_loop:TrainingLoop.save", 5),
        ("harness.run.training_loop:TrainingLoop.state_dict", 5),
        ("harness.run.checkpoints:Checkpoints.save", 5),
        ("harness.run.checkpoints:write", 5),
        ("harness.run.checkpoints:digest", 5),
        ("harness.files:sync_folder", 9),
        ("harness.run.checkpoints:Checkpoints._rotate", 5),
    ],
    "shutting down": [
        ("harness.run.training_loop:TrainingLoop.summary", 1),
        ("collectors.base:BaseCollector.shutdown", 1),
        ("collectors.workers.pool:WorkerPool.close", 1),
        ("collectors.workers.process_handle:ProcessHandle.end", 2),
        ("sync.sender:Sender.close", 1),
        ("harness.run.run_lifetime:RunLifetime._end", 1),
        ("harness.logging:Loggers.finish", 1),
        ("harness.run_directory:RunDir.end", 1),
        ("harness.run_directory:RunDir.set_state", 2),
        ("harness.logging.display:Display.finish", 1),
    ],
}

# The phases in which there are workers, and those in which there is a run directory.
WITH_WORKERS = ("connecting", "collecting", "updating", "publishing", "logging", "evaluating")
WITH_DIRECTORY = (*WITH_WORKERS, "starting workers", "saving")

# In a worker.
WORKER: dict[str, list[tuple[str, int]]] = {
    "starting": [
        ("collectors.workers.worker_loop:main", 1),
        ("collectors.workers.worker_loop:WorkerLoop.prepare", 1),
        ("collectors.workers.worker_loop:steps_of", 1),
        ("collectors.workers.worker_loop:WorkerLoop._connect", 1),
    ],
    "collecting": [
        ("collectors.workers.worker_loop:WorkerLoop._collect", 8),
        ("collectors.workers.worker_loop:WorkerLoop._share", 1),
        ("collectors.workers.worker_loop:WorkerLoop._poll_control", 200),
        ("collectors.rollout.rollout:Rollout.collect", 8),
    ],
    "handing over": [
        ("collectors.workers.pipe:Pipe.send", 8),
    ],
    "taking weights": [("collectors.workers.worker_loop:WorkerLoop._take", 8)],
    "resting": [("collectors.workers.worker_loop:WorkerLoop._rest", 4)],
    "leaving": [("collectors.workers.worker_loop:WorkerLoop.close", 1)],
}
