"""AsyncGRPOTrainer's staleness and max_staleness are one update too low. CPU only, no vLLM, no hub.

python trl_staleness.py
"""

import contextlib
import io
import os
import queue
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", CUDA_VISIBLE_DEVICES="")

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample


class Attention:
    """In place of the kernel from the hub, which needs a GPU: one causal segment after another."""

    @staticmethod
    def flash_attn_varlen_func(q, k, v, starts_q, starts_k, *sizes, softmax_scale=None, **options):
        parts = []
        for i in range(len(starts_q) - 1):
            rows, columns = (slice(*starts[i : i + 2].tolist()) for starts in (starts_q, starts_k))
            n, m = rows.stop - rows.start, columns.stop - columns.start
            mask = torch.ones(n, m, dtype=torch.bool).tril(m - n)
            one, two, three = q[rows].transpose(0, 1), k[columns], v[columns]
            out = torch.nn.functional.scaled_dot_product_attention(
                one, two.transpose(0, 1), three.transpose(0, 1), mask, scale=softmax_scale
            )
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)


packing._flash_attn = lambda: Attention
async_grpo_trainer.get_peak_flops_per_device = lambda *arguments: None  # asks torch.cuda


class NoTransfer:
    def init_weight_transfer(self): ...
    def pause(self): ...
    def send_weights(self, iterator):
        for _ in iterator:
            pass

    def resume(self): ...
    def destroy(self): ...


class Worker:
    """Makes each sample when the trainer asks for it, so it is as new as a sample can be."""

    def __init__(self):
        self.rollout_buffer, self.metrics_queue = self, queue.Queue()
        self.version, self.made = 0, []

    def get(self, timeout=None):
        self.made.append(self.version)
        ids, mask = np.array([1, 2, 3, 4]), np.array([0, 0, 1, 1])
        chances = np.array([0.0, 0.0, -2.0, -2.0], np.float32)
        number = len(self.made)
        metrics = {"reward": 0.0}
        return RolloutSample([], [], ids, mask, chances, 1.0, self.version, number, metrics)

    def qsize(self):
        return 0

    def start(self): ...
    def stop(self): ...
    def update_model_version(self, model_version):
        self.version = model_version

    def check_health(self, stale_after_s): ...


class Trainer(AsyncGRPOTrainer):
    at_use = ()

    def compute_loss(self, *arguments, **options):
        self.at_use = [*self.at_use, self.model_version]
        return super().compute_loss(*arguments, **options)


def make_model(folder):
    vocabulary = {str(i): i for i in range(6)} | {"<pad>": 6, "<eos>": 7}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=8, pad_token_id=6, eos_token_id=7, **sizes, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_trainer(folder, updates):
    """A trainer of a small model, which is made in the folder."""
    make_model(folder)
    args = AsyncGRPOConfig(
        output_dir=f"{folder}/out",
        max_steps=updates,
        per_device_train_batch_size=4,
        token_budget=-1,
        max_staleness=0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    return Trainer(
        model=str(folder),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["1 2"]}),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        rollout_worker=Worker(),
        weight_transfer=NoTransfer(),
    )


def main():
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, updates=6)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    logs = [log for log in trainer.state.log_history if "sample/staleness_mean" in log]
    print("update  version of the samples  version that trains  age  logged  dropped")
    for update, (used, log) in enumerate(zip(trainer.at_use, logs, strict=True)):
        acted = trainer.rollout_worker.made[4 * update]
        said, dropped = log["sample/staleness_mean"], log.get("sample/dropped_stale_total") or 0
        print(f"{update:6}  {acted:22}  {used:19}  {used - acted:3}  {said:6.1f}  {dropped:7.0f}")


if __name__ == "__main__":
    main()
