"""GRPOTrainer(rollout_func=) requires log-probabilities and without vLLM does not use them.

python trl_rollout_func.py
"""

import contextlib
import copy
import hashlib
import io
import os
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", CUDA_VISIBLE_DEVICES="")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from trl import GRPOConfig, GRPOTrainer


def make_tokenizer():
    vocabulary = {str(i): i for i in range(10)} | {"<pad>": 10, "<eos>": 11}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def train(folder, *, false):
    """Eight updates on answers of the first weights, with their log-probabilities or with -99."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=12, pad_token_id=10, eos_token_id=11, **sizes, **heads)
    model, tokenizer = AutoModelForCausalLM.from_config(config), make_tokenizer()
    actor = copy.deepcopy(model).eval()  # never updated
    random = torch.Generator().manual_seed(0)

    def rollout(prompts, trainer):
        result = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for prompt in prompts:
            ids, chances = tokenizer(prompt)["input_ids"], []
            text = torch.tensor([ids])
            with torch.no_grad():
                for _ in range(4):
                    scores = actor(input_ids=text).logits[:, -1].log_softmax(-1)
                    token = torch.multinomial(scores.exp(), 1, generator=random)
                    chances.append(-99.0 if false else float(scores[0, token]))
                    text = torch.cat([text, token], 1)
            result["prompt_ids"].append(ids)
            result["completion_ids"].append(text[0, len(ids) :].tolist())
            result["logprobs"].append(chances)
        return result

    args = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=8,
        num_generations=8,
        max_steps=8,
        max_completion_length=4,
        learning_rate=1e-2,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["3 1 2 0", "5 4 9 8"] * 8}),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **columns: [float(one.count("1")) for one in completions],
        rollout_func=rollout,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    clipped = [log["clip_ratio/region_mean"] for log in trainer.state.log_history if "loss" in log]
    return hashlib.sha256(weights).hexdigest()[:16], max(clipped)


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for false in (False, True):
            weights, clipped = train(folder, false=false)
            name = "-99 for each token" if false else "true"
            print(f"log-probabilities: {name:18}  final weights: {weights}  clipped: {clipped}")


if __name__ == "__main__":
    main()
