"""Make the reward model of `examples/reward_stage/judge`: a sequence classifier that knows good answers from bad ones.

    python examples/reward_stage/make_judge.py --out examples/reward_stage/judge

It learns from what the tiny policy itself answers, marked by the rule of `chain_sum`: its body is the policy's first
layers, and by squared error it learns to say 1 of a right answer and 0 of any other, so that what it says is about the
chance that the answer is right. It is too small to add up, but it sees which way of answering mostly ends well.
One core, two minutes.

Legend: B batch, S sequence of prompt and response.
"""

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification

from megatron_grpo.data import ChainSum
from megatron_grpo.rollout.rewards.exact import chain_sum_reward

POLICY = Path(__file__).parents[1] / "tiny/policy"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
AT_ONCE = 512

Examples = tuple[torch.Tensor, torch.Tensor]
"""Ids `[B, S]`, padded on the right, and what the rule says of each, `[B]`."""


@torch.no_grad()
def answered(tokenizer: Any, task: ChainSum, rows: range) -> Examples:
    """What the policy answers to the task's problems `rows`, at temperature 1."""
    policy = LlamaForCausalLM.from_pretrained(POLICY).eval()
    whole, rewards = [], []
    for start in range(rows.start, rows.stop, AT_ONCE):
        problems = [task.train_problem(row) for row in range(start, min(start + AT_ONCE, rows.stop))]
        prompts = tokenizer([p.prompt for p in problems], return_tensors="pt", return_token_type_ids=False)
        ids_BS = policy.generate(**prompts, do_sample=True, top_k=0)
        whole += ids_BS.unbind()
        for problem, ids_S in zip(problems, ids_BS[:, prompts["input_ids"].shape[1] :], strict=True):
            ended = tokenizer.eos_token_id in ids_S.tolist()
            said = tokenizer.decode(ids_S, skip_special_tokens=True)
            rewards.append(chain_sum_reward(said, problem.answer, ended).reward)
    padded_BS = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True, padding_value=tokenizer.pad_token_id)
    return padded_BS, torch.tensor(rewards)


def scores(model: LlamaForSequenceClassification, ids_BS: torch.Tensor, pad_id: int) -> torch.Tensor:
    """`[B]`."""
    said_B1: torch.Tensor = model(input_ids=ids_BS, attention_mask=ids_BS != pad_id).logits
    return said_B1[:, 0]


@torch.no_grad()
def how_good(model: LlamaForSequenceClassification, held_out: Examples, pad_id: int) -> str:
    """How well it tells right from wrong."""
    ids_BS, right_B = held_out
    said_B = scores(model, ids_BS, pad_id)
    good, bad = said_B[right_B == 1], said_B[right_B == 0]
    above = (good[:, None] > bad[None]).float().mean()
    return f"a right answer above a wrong one {above:.3f}; mean of right {good.mean():.2f}, of wrong {bad.mean():.2f}"


def train(
    model: LlamaForSequenceClassification, examples: Examples, held_out: Examples, pad_id: int, args: argparse.Namespace
) -> None:
    """In place, `args.epochs` times over the examples."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
    started, steps = time.monotonic(), -(-len(examples[0]) // args.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps * args.epochs, pct_start=0.1)
    for epoch in range(args.epochs):
        for rows_B in torch.randperm(len(examples[0])).split(args.batch):
            ids_BS, right_B = (x[rows_B] for x in examples)
            loss = (scores(model, ids_BS, pad_id) - right_B).square().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}  {time.monotonic() - started:.0f} s  {how_good(model, held_out, pad_id)}", flush=True)


def main() -> None:
    """Sample, train and save, in bfloat16."""
    parser = argparse.ArgumentParser(description="Make the chain_sum reward model.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--answers", type=int, default=6144)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    ids_BS, right_B = answered(tokenizer, ChainSum(terms=3, val_size=16, seed=args.seed + 77), range(args.answers))
    print(f"{len(right_B)} answers, {right_B.mean():.3f} of them right", flush=True)
    model = LlamaForSequenceClassification.from_pretrained(POLICY, num_labels=1, num_hidden_layers=args.layers)
    torch.nn.init.zeros_(model.score.weight)
    held = args.answers // 8
    train(model, (ids_BS[held:], right_B[held:]), (ids_BS[:held], right_B[:held]), tokenizer.pad_token_id, args)
    model.to(torch.bfloat16).save_pretrained(args.out)
    for name in TOKENIZER_FILES:
        shutil.copy(POLICY / name, args.out)
    print(f"saved {sum(p.numel() for p in model.parameters()):,} parameters in {args.out}")


if __name__ == "__main__":
    main()
