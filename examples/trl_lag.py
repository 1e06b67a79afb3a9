"""A dose curve of TRL's AsyncGRPOTrainer: what a lag of 0, 1, 4 or 16 weight syncs costs.

A Qwen3 of 84,000 parameters, made here, learns to sort digits. It takes minutes on two cores:

    python examples/trl_lag.py --lag 0 4 16 --seed 1 2 3
    python -m harness.report outputs/trl --x sync.lag
"""

import argparse
import os
from dataclasses import fields
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
)
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from harness.environments.tokens import NUM_TOKENS, Sort
from lockstep_trl import LockstepRollouts

SIGNS = ["+", "-", "*", "="]
WORDS = ["<pad>", *map(str, range(10)), *SIGNS, "<eos>"]  # as Lockstep's tasks number them


def make_model(folder, digits=4, pretraining=0):
    """A small model and its tokenizer, in a folder: TRL wants a name."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=NUM_TOKENS + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=NUM_TOKENS,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    pretrain(model, digits, pretraining)
    model.save_pretrained(folder)
    return str(folder)


def pretrain(model, digits, updates):
    """Show the model right answers for a while: it then sorts well enough to be rewarded."""
    task, random = Sort(digits), np.random.default_rng(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(updates):
        prompts = np.stack([task.prompt(random) for _ in range(64)])
        texts = torch.tensor(np.concatenate([prompts, task.expected(prompts)], 1))
        labels = texts.clone()
        labels[:, : prompts.shape[1]] = -100
        optimiser.zero_grad()
        model(input_ids=texts, labels=labels).loss.backward()
        optimiser.step()


def make_prompts(digits, count, seed):
    """Prompts such as `3 1 2 0 =`."""
    random, task = np.random.default_rng(seed), Sort(digits)
    return Dataset.from_list(
        [{"prompt": " ".join(WORDS[i] for i in task.prompt(random))} for _ in range(count)]
    )


def sorted_share(prompts, completions, **columns):
    """The reward: the share of the digits that stand where they should."""
    scores = []
    for prompt, completion in zip(prompts, completions, strict=True):
        right, answer = sorted(prompt.split()[:-1]), completion.split()
        scores.append(sum(map(str.__eq__, right, answer)) / len(right))
    return scores


def train(
    model,
    *,
    lag=0,
    seed=1,
    digits=4,
    updates=150,
    batch=32,
    run_dir=None,
    resume=None,
    prompts=None,
    reward=sorted_share,
    **options,
):
    """One run. `options` are arguments of `AsyncGRPOConfig` or of `LockstepRollouts`."""
    prompts = prompts or make_prompts(digits, 4096, seed=10_000 + seed)
    names = {field.name for field in fields(AsyncGRPOConfig)}
    arguments = {name: value for name, value in options.items() if name in names}
    evaluation = {"eval_prompts": make_prompts(digits, 200, seed=1), "eval_every": updates // 10}
    rollouts = LockstepRollouts(
        model,
        prompts,
        reward,
        lag=lag,
        run_dir=run_dir,
        options={"env": {"id": f"sort {digits} digits"}},
        **evaluation | {name: value for name, value in options.items() if name not in names},
    )
    defaults = {
        "output_dir": str(Path(run_dir or "outputs/trl/unnamed") / "trl"),
        "max_steps": updates,
        "per_device_train_batch_size": batch,
        "max_completion_length": digits,
        "max_staleness": 1000,
        "learning_rate": 3e-3,
        "token_budget": -1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": seed,
    }
    trainer = AsyncGRPOTrainer(
        model=model,
        args=AsyncGRPOConfig(**defaults | arguments),
        train_dataset=prompts,
        reward_funcs=reward,
        rollout_worker=rollouts.worker,
        weight_transfer=rollouts.transfer,
    )
    rollouts.attach(trainer)
    trainer.remove_callback(PrinterCallback)  # metrics.jsonl has each record
    trainer.train(resume_from_checkpoint=resume)
    return rollouts, trainer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lag", type=int, nargs="+", default=[0, 4, 16])
    parser.add_argument("--seed", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--digits", type=int, default=4)
    parser.add_argument("--pretraining", type=int, default=0, help="supervised updates before")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument(
        "--batch", type=int, default=128, help="answers in an update, 8 to a prompt"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--epsilon", type=float, default=0.2, help="of the clip")
    parser.add_argument("--out", type=Path, default=Path("outputs/trl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model(options.out / ".model", options.digits, options.pretraining)
    for seed in options.seed:
        for lag in options.lag:
            rollouts, _ = train(
                model,
                lag=lag,
                seed=seed,
                digits=options.digits,
                updates=options.updates,
                batch=options.batch,
                learning_rate=options.learning_rate,
                epsilon=options.epsilon,
                size=options.batch // 8,
                run_dir=options.out / f"lag={lag},seed={seed}",
            )
            print(f"lag {lag}, seed {seed}: {rollouts.record.scores}", flush=True)


if __name__ == "__main__":
    main()
