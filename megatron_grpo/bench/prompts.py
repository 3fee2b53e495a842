"""Prompts of the benchmark: arithmetic word problems and plain instructions, or those of a file."""

import json
import random
from itertools import islice
from pathlib import Path

from megatron_grpo.config import ConfigError

NAMES = ("Mara", "Jonas", "Aiko", "Tunde", "Lena", "Pablo", "Ines", "Ravi", "Freya", "Omar")
GOODS = ("apples", "notebooks", "marbles", "tickets", "bricks", "postcards", "shells", "candles")

WORD_PROBLEMS = (
    "{name} has {a} {goods} and buys {b} more. Then {c} of them are given away. How many {goods} does {name} have now?",
    "A shop sells {goods} at {c} dollars each. {name} buys {a}. How much does that cost in dollars?",
    "{name} packs {a} {goods} into boxes of {c}. How many boxes are full, and how many {goods} are left over?",
    "A train travels {a} kilometres in the first hour and {b} in the second. How far is that, and what is the mean?",
    "{name} reads {c} pages on the first day and twice as many on each of the next three. How many is that?",
    "What is {a} plus {b} minus {c}? Show each step.",
    "{name} and a friend share {a} {goods} so that {name} gets {c} more. How many does each of them get?",
    "A garden is {c} metres wide and {a} metres long. What are its area and the length of the fence around it?",
    "{name} earns {b} dollars a week and spends {c} dollars a day. How much is left after one week?",
)

INSTRUCTIONS = (
    "Explain in three sentences why the sky is blue.",
    "Write a short poem about a lighthouse in winter.",
    "List five things to check before a long bicycle tour.",
    "What is the difference between weather and climate?",
    "Write a polite e-mail that moves a meeting from Monday to Thursday.",
    "Describe how bread is made, step by step.",
    "Give me a recipe for a simple vegetable soup.",
    "Write a Python function that reverses the words of a sentence.",
    "Who was Marie Curie, and what is she known for?",
    "Summarise the story of Robinson Crusoe in four sentences.",
    "What are the advantages of trains over planes?",
    "Translate into French: The library is closed on Sundays.",
    "Tell a short story about a fox that learns to read.",
    "How does a refrigerator keep food cold?",
    "Name three rivers in Africa and say where each one ends.",
    "Explain to a child what an electric current is.",
    "Write a dialogue between a teacher and a student who is late.",
    "What should I pack for a week at the sea?",
    "Give two arguments for and two against homework.",
    "How do bees find flowers, and how do they tell the others?",
    "Write a product description of a wooden chair.",
    "What is a prime number? Is 91 one?",
    "Describe the view from a mountain at sunrise.",
    "How can I remember the names of people better?",
    "Explain the rules of chess to somebody who has never played.",
    "Write a headline and one paragraph about a town that banned cars.",
    "What happens in the body when we sleep?",
    "Compare tea and coffee in a short table.",
    "Correct this sentence: She don't likes to swimming in the lake.",
    "Why do leaves change their colour in autumn?",
    "Suggest four names for a small bakery and explain one of them.",
    "What was the printing press, and why did it matter?",
)


def built_in_prompts(count: int, seed: int) -> list[str]:
    """``count`` different prompts, word problems and instructions in turn; further word problems when those run out."""
    draw = random.Random(seed)
    instructions = draw.sample(INSTRUCTIONS, len(INSTRUCTIONS))
    chosen: dict[str, None] = {}
    while len(chosen) < count:
        chosen[_word_problem(draw)] = None
        if instructions:
            chosen[instructions.pop()] = None
    return list(islice(chosen, count))


def _word_problem(draw: random.Random) -> str:
    return draw.choice(WORD_PROBLEMS).format(
        name=draw.choice(NAMES),
        goods=draw.choice(GOODS),
        a=draw.randint(21, 99),
        b=draw.randint(21, 99),
        c=draw.randint(3, 19),
    )


def file_prompts(file: Path, count: int | None = None) -> list[str]:
    """The first ``count`` prompts (or all) of a file with one JSON object a line, under ``prompt`` or ``question``.

    Raises:
        ConfigError: the file cannot be read, a line is wrong, or there are fewer or none.
    """
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts={file}: cannot be read ({error}); give a text file of JSON lines") from error
    if not lines:
        raise ConfigError(f"--prompts={file}: is empty; give a text file of JSON lines")
    if count is not None and len(lines) < count:
        raise ConfigError(f"--prompts={file}: has {len(lines)} prompts; give {count}, or fewer --texts")
    return [_prompt(line, number, file) for number, line in enumerate(lines[:count], start=1)]


def _prompt(line: str, number: int, file: Path) -> str:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    found = (entry.get("prompt") or entry.get("question")) if isinstance(entry, dict) else None
    if not isinstance(found, str):
        raise ConfigError(f'--prompts={file}: line {number} is no object with a text under "prompt"; correct it')
    return found
