"""Registries of everything that a config can name: algorithms, models, schemes, and so on.

    from harness.registry import algorithms

    @algorithms.register("reinforce", options=ReinforceConfig)
    class Reinforce: ...

makes `algo=reinforce` an algorithm, with the fields of ReinforceConfig as its options. The module
must be imported before the config is composed: `plugins=[my_package.my_module]`, or the entry-point
group `lockstep.plugins` (harness/plugins.py). The parts that come with Lockstep are added below in
the same way, by the path of what makes them, so that nothing heavy is imported here.
"""

from __future__ import annotations

from harness.options import algorithms as algo
from harness.options import collectors as collect
from harness.options import loggers as log
from harness.options import models as model
from harness.options import objectives as objective
from harness.options import simulated, sync
from harness.options.base import Options
from harness.parts import Registry

# Made with (options, setup): see harness/algorithms/interface.py.
algorithms = Registry("algorithm", "algo", algo.AlgorithmConfig)
algorithms.add("ppo", "harness.algorithms.ppo:PPO", algo.PPOConfig)
algorithms.add("impala", "harness.algorithms.impala:IMPALA", algo.IMPALAConfig)
algorithms.add("sac", "harness.algorithms.sac:SAC", algo.SACConfig)
algorithms.add("dqn", "harness.algorithms.dqn:DQN", algo.DQNConfig)

# Called with (frames, config of the algorithm, options=): see harness/algorithms/objectives.py.
objectives = Registry("objective", "algo.objective")
for name, objective_options in (
    ("behaviour", None),
    ("proximal", None),
    ("decoupled", objective.DecoupledConfig),
    ("ewma", objective.EWMAConfig),
    ("dual_clip", objective.DualClipConfig),
    ("vtrace", objective.VTraceConfig),
    ("truncated_is", objective.TruncatedISConfig),
    ("cispo", objective.CISPOConfig),
    ("m2po", objective.M2POConfig),
    ("dppo", objective.DPPOConfig),
    ("sapo", objective.SAPOConfig),
    ("vcpo", objective.VCPOConfig),
    ("vaco", objective.VACOConfig),
    ("a3po", objective.A3POConfig),
    ("gspo", objective.GSPOConfig),
    ("sequence_is", objective.SequenceISConfig),
    ("geometric", objective.GeometricConfig),
    ("vespo", objective.VESPOConfig),
):
    objectives.add(name, f"harness.algorithms.objectives:{name}", objective_options)

# Made with (options, observation_space): an encoder, see harness/models/encoders.py. One whose
# options derive from MemoryConfig is followed by an LSTM.
models = Registry("model", "model", model.ModelConfig)
models.add("mlp", "harness.models.encoders:MLPEncoder", model.MLPConfig)
models.add("cnn", "harness.models.encoders:CNNEncoder", model.CNNConfig)
models.add("impala_cnn", "harness.models.encoders:ImpalaCNNEncoder", model.ImpalaCNNConfig)
models.add("minatar_cnn", "harness.models.encoders:MinAtarCNNEncoder", model.MinAtarCNNConfig)
models.add("lstm", "harness.models.encoders:MLPEncoder", model.LSTMConfig)
models.add("cnn_lstm", "harness.models.encoders:CNNEncoder", model.CNNLSTMConfig)
models.add("impala_cnn_lstm", "harness.models.encoders:ImpalaCNNEncoder", model.ImpalaCNNLSTMConfig)
models.add(
    "minatar_cnn_lstm", "harness.models.encoders:MinAtarCNNEncoder", model.MinAtarCNNLSTMConfig
)

# Made with (env, **arguments); `vector` wraps a native vector of environments.
wrappers = Registry("wrapper", "env.wrappers")
for name, single, vector in (
    ("atari", "AtariPreprocessing", None),
    ("clip_reward", "ClipReward", "ClipReward"),
    ("delay_observation", "DelayObservation", None),
    ("flatten_observation", "FlattenObservation", "FlattenObservation"),
    ("frame_stack", "FrameStackObservation", None),
    ("grayscale", "GrayscaleObservation", "GrayscaleObservation"),
    ("repeat_action", "RepeatAction", None),
    ("rescale_action", "RescaleAction", "RescaleAction"),
    ("rescale_observation", "RescaleObservation", "RescaleObservation"),
    ("resize", "ResizeObservation", "ResizeObservation"),
    ("sticky_action", "StickyAction", None),
    ("time_aware", "TimeAwareObservation", None),
):
    of_vectors = vector and f"gymnasium.wrappers.vector:{vector}"
    wrappers.add(name, f"gymnasium.wrappers:{single}", vector=of_vectors)
wrappers.add("episodic_life", "harness.environments.wrappers:EpisodicLife")
wrappers.add("fire_reset", "harness.environments.wrappers:FireReset")
wrappers.add("one_hot_grid", "harness.environments.wrappers:OneHotGrid")

# Made with options.arguments(): see sync/scheme.py and examples/own_scheme.py.
schemes = Registry("sync scheme", "sync", sync.SyncConfig)
schemes.add("shared_mem", "sync:SharedMemWeightSyncScheme", sync.SharedMemConfig)
schemes.add("multiprocess", "sync:MultiProcessWeightSyncScheme", sync.MultiProcessConfig)
schemes.add("hogwild", "sync:HogwildWeightSyncScheme", sync.HogwildConfig)
schemes.add("none", "sync:NoWeightSyncScheme", sync.NoneConfig)
schemes.add("distributed", "sync:DistributedWeightSyncScheme", sync.DistributedConfig)
schemes.add("rpc", "sync:RPCWeightSyncScheme", sync.RPCConfig)
schemes.add("ray", "sync:RayWeightSyncScheme", sync.RaySyncConfig)

# Made with (env factory, policy, weight_sync_schemes=, seed=, **options.arguments(config)).
collectors = Registry("collector", "collector", collect.CollectorConfig)
collectors.add("single", "collectors:Collector", collect.SingleConfig)
collectors.add("multi_sync", "collectors:MultiSyncCollector", collect.MultiSyncConfig)
collectors.add("multi_async", "collectors:MultiAsyncCollector", collect.MultiAsyncConfig)
collectors.add("simulated", "collectors:SimulatedCollector", simulated.SimulatedConfig)
collectors.add("distributed", "collectors:DistributedCollector", collect.DistributedCollectorConfig)
collectors.add("rpc", "collectors:RPCCollector", collect.RPCCollectorConfig)
collectors.add("ray", "collectors:RayCollector", collect.RayCollectorConfig)

# Made with (options, run_dir, info): a harness.logging.Logger, or None.
loggers = Registry("logger", "logger", log.LoggerConfig, several=True)
loggers.add("jsonl", "harness.logging.jsonl:no_more_loggers", log.JsonlConfig)
loggers.add("wandb", "harness.logging.wandb:make", log.WandbConfig)
loggers.add("tensorboard", "harness.logging.tensorboard:TensorBoardLogger", log.TensorBoardConfig)
loggers.add("trackio", "harness.logging.trackio:TrackioLogger", log.TrackioConfig)
loggers.add("trace", "harness.logging.trace:TraceLogger", log.TraceConfig)

# Made with (options): a harness.callbacks.Callback.
callbacks = Registry("callback", "callbacks", Options, several=True)

GROUPS = (algorithms, collectors, schemes, models, loggers, callbacks)  # groups of the config
