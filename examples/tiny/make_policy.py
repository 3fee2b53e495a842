"""Make the tiny policy of `examples/tiny/policy`: train its tokenizer, then the model, until it is mediocre.

    python examples/tiny/make_policy.py --out examples/tiny/policy

The policy learns `chain_sum` from worked answers, some direct and some by running totals with slips in them,
and training stops while it is still often wrong, so that GRPO has something to do. One core, a few minutes;
the same seed and library versions give the same files.

Legend: B batch, S sequence of prompt and response, V vocabulary.
"""

from __future__ import annotations

import argparse
import io
import random
import string
import time
from pathlib import Path

import sentencepiece
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron_grpo.data import ChainSum, Problem

SPECIALS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
# No "<": a policy must not be able to spell a special token out of ordinary pieces.
CHARACTERS = string.digits + string.ascii_lowercase + " +-*/=>().,:?!#$%'\"_\\{}"
NEWLINE = "\n"
MAX_POSITIONS = 128
MAX_RESPONSE = 28
IGNORED = -100


def train_sentencepiece(model_file: Path) -> sentencepiece.SentencePieceProcessor:
    """Train and save a SentencePiece model of one piece a character; it neither adds nor changes any text."""
    shuffle = random.Random(0)
    trained = io.BytesIO()  # a file name would be written into the model
    lines = ["".join(shuffle.sample(CHARACTERS, len(CHARACTERS))) for _ in range(200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=trained,
        model_type="bpe",
        vocab_size=len(SPECIALS) + len(NEWLINE) + len(CHARACTERS),
        user_defined_symbols=[NEWLINE],
        character_coverage=1.0,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=3,
        unk_surface="<unk>",
        minloglevel=1,
    )
    model_file.write_bytes(trained.getvalue())
    return sentencepiece.SentencePieceProcessor(model_file=str(model_file))


def make_tokenizer(pieces: sentencepiece.SentencePieceProcessor) -> PreTrainedTokenizerFast:
    """The same tokenizer for transformers: the same ids, a BOS in front of every text."""
    vocabulary = {pieces.id_to_piece(i): i for i in range(pieces.vocab_size())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", pieces.bos_id())]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        **SPECIALS,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of hidden size 96 and 4 layers (529,248 parameters), float32, freshly initialised."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_POSITIONS,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            initializer_range=0.05,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=MAX_RESPONSE,
    )
    return model


@torch.no_grad()
def scale_weights(model: LlamaForCausalLM, factor: float) -> None:
    """Multiply every matrix by ``factor`` and divide every norm gain by it: the function stays what it is.

    RMSNorm takes the scale of what it reads out again. An Adam step of a given learning rate then moves the function
    ``factor`` times less, as it does in large models, whose weights are large beside the step.
    """
    for name, weight in model.named_parameters():
        weight.mul_(1.0 / factor if "norm" in name else factor)


def worked_answer(problem: Problem, choose: random.Random, args: argparse.Namespace) -> str:
    """A teacher's response: `=14` at once, or running totals first (`19,14=14`), each wrong by chance."""
    if choose.random() < args.direct:
        return f"={problem.answer}"
    first, *rest = (int(term) for term in problem.prompt.rstrip(">").split("+"))
    total, totals = first, []
    for term in rest:
        total = (total + term) % 100
        if choose.random() < args.slip:
            total = (total + choose.choice([1, -1, 10, -10])) % 100
        totals.append(f"{total:02d}")
    if choose.random() < args.recheck:
        totals.append(totals[-1])
    return ",".join(totals) + f"={totals[-1]}"


def encode_batch(
    tokenizer: PreTrainedTokenizerFast, prompts: list[str], responses: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels, int64 `[B, S]`; labels are IGNORED on the prompt and after the EOS."""
    prompt_ids = tokenizer(prompts)["input_ids"]
    ended = [response + SPECIALS["eos_token"] for response in responses]
    response_ids = tokenizer(ended, add_special_tokens=False)["input_ids"]
    longest = max(len(p) + len(r) for p, r in zip(prompt_ids, response_ids, strict=True))
    tokens_BS = torch.full((len(prompts), longest), tokenizer.pad_token_id)
    labels_BS = torch.full((len(prompts), longest), IGNORED)
    for row, (prompt, response) in enumerate(zip(prompt_ids, response_ids, strict=True)):
        end = len(prompt) + len(response)
        tokens_BS[row, :end] = torch.tensor(prompt + response)
        labels_BS[row, len(prompt) : end] = torch.tensor(response)
    return tokens_BS, labels_BS


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], *, sample: bool
) -> tuple[float, float]:
    """Share of right responses, and share of direct ones, greedy or sampled at temperature 1.

    Right means: ended by EOS, exactly one `=`, and the answer after it.
    """
    inputs = tokenizer([p.prompt for p in problems], return_tensors="pt", return_token_type_ids=False)
    tokens_BS = model.generate(**inputs, do_sample=sample, **({"top_k": 0} if sample else {}))
    responses = tokenizer.batch_decode(tokens_BS[:, inputs["input_ids"].shape[1] :])
    right = 0
    for problem, response in zip(problems, responses, strict=True):
        text, ended, _ = response.partition(SPECIALS["eos_token"])
        right += bool(ended) and text.count("=") == 1 and text.endswith(f"={problem.answer}")
    return right / len(problems), sum(r.startswith("=") for r in responses) / len(problems)


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> bool:
    """Train in place until both accuracies lie in their bands; False when `args.iterations` run out first."""
    task = ChainSum(terms=3, val_size=512, seed=args.seed + 1_000_003)
    held_out = task.validation()
    choose = random.Random(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    started = time.monotonic()
    for iteration in range(args.iterations):
        first = iteration * args.batch
        problems = [task.train_problem(index) for index in range(first, first + args.batch)]
        responses = [worked_answer(p, choose, args) for p in problems]
        tokens_BS, labels_BS = encode_batch(tokenizer, [p.prompt for p in problems], responses)
        logits_BSV = model(input_ids=tokens_BS[:, :-1]).logits
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS[:, 1:].flatten(), ignore_index=IGNORED)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (iteration + 1) / 100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (iteration + 1) % args.every == 0:
            seconds = time.monotonic() - started
            print(f"iteration {iteration + 1}  {seconds:.0f} s  loss {loss.item():.3f}", end="  ")
            if is_mediocre(model, tokenizer, held_out, args):
                return True
    return False


def is_mediocre(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    held_out: list[Problem],
    args: argparse.Namespace,
) -> bool:
    """Print both accuracies; whether each lies in its wanted band."""
    greedy, _ = accuracy(model, tokenizer, held_out, sample=False)
    sampled, direct = accuracy(model, tokenizer, held_out, sample=True)
    print(f"greedy {greedy:.3f}  sampled {sampled:.3f}  direct {direct:.3f}", flush=True)
    return args.greedy[0] <= greedy <= args.greedy[1] and args.sampled[0] <= sampled <= args.sampled[1]


def parse_arguments() -> argparse.Namespace:
    """The command line; the defaults made the shipped policy."""
    parser = argparse.ArgumentParser(description="Make the tiny chain_sum policy and its tokenizer.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=700, help="give up after this many")
    parser.add_argument("--every", type=int, default=10, help="iterations between validations")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--scale", type=float, default=2.0, help="final scale of the matrices, norms inversely")
    parser.add_argument("--direct", type=float, default=0.45, help="share of direct answers")
    parser.add_argument("--slip", type=float, default=0.05, help="chance that a running total is wrong")
    parser.add_argument("--recheck", type=float, default=0.15, help="chance that the last total is repeated")
    parser.add_argument("--greedy", type=float, nargs=2, default=(0.40, 0.50), help="wanted band, greedy")
    parser.add_argument("--sampled", type=float, nargs=2, default=(0.25, 0.32), help="wanted band, sampled")
    return parser.parse_args()


def main() -> None:
    """Train and save; exits with 1, saving no model, when the wanted bands are not met."""
    args = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(train_sentencepiece(args.out / "tokenizer.model"))
    model = make_model(tokenizer)
    if not train(model, tokenizer, args):
        raise SystemExit("the wanted accuracy was not met; change --iterations, --greedy or --sampled")
    scale_weights(model, args.scale)
    tokenizer.save_pretrained(args.out)
    model.save_pretrained(args.out)
    print(f"saved {sum(p.numel() for p in model.parameters()):,} parameters in {args.out}")


if __name__ == "__main__":
    main()
