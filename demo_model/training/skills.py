"""The demo model's skills other than answering questions: repeat, add, count. Each skill makes (prompt, answer) pairs.

Knows the wording of requests and their only right answer; does not know conversations, tokens or training.
All randomness comes from the generator that is passed in.
"""

import random
import string
from collections.abc import Sequence

Pair = tuple[str, str]

MAX_ADDEND = 99
MAX_COUNT = 200
DECLINE_SUM = f"I can only add two whole numbers from 0 to {MAX_ADDEND}, and I would rather not guess."
DECLINE_COUNT = f"I can only count upwards between 0 and {MAX_COUNT}."

_NONCE_ALPHABETS = (
    string.ascii_letters + string.digits + "-_",
    string.ascii_letters + string.digits + "-_",
    string.ascii_letters + string.digits,
    string.ascii_lowercase + string.digits + "-",
    string.ascii_lowercase + string.digits,
    string.ascii_uppercase + string.digits + "_",
    "0123456789abcdef",
    string.ascii_lowercase,
    string.ascii_uppercase,
    string.ascii_letters,
    string.digits,
    "ab01-_",
)
_REPEAT_COLON = (
    "Repeat: ", "Repeat: ", "Repeat: ", "Repeat: ", "repeat: ", "Repeat:", "REPEAT: ", "Repeat:\n",
    "Please repeat: ", "Please repeat exactly: ", "Repeat exactly: ", "Repeat after me: ", "Repeat this: ",
    "Repeat this exactly: ", "Repeat the following: ", "Repeat the following exactly: ", "Repeat this text: ",
    "Repeat this word: ", "Repeat the word: ", "Repeat the nonce: ", "Repeat this nonce: ",
    "Repeat the string: ", "Repeat the following text exactly:\n", "Please repeat the following: ", "Say: ",
    "say: ", "Please say: ", "Say exactly: ", "Say this: ", "Echo: ", "echo: ", "Echo this: ",
    "Please echo: ", "Echo exactly: ", "Reply with exactly: ", "Reply with: ", "Answer with exactly: ",
    "Copy: ", "Copy exactly: ", "Copy this: ", "Output exactly: ", "Print: ", "Write: ", "Now repeat: ",
    "Can you repeat: ", "Could you repeat this: ",
)  # fmt: skip
_REPEAT_BARE = (
    "Repeat ",
    "repeat ",
    "Please repeat ",
    "Say ",
    "Echo ",
    "echo ",
    "Repeat exactly ",
    "Repeat the nonce ",
)
_SUM_FORMS = (
    "What is {a} + {b}?", "What is {a} + {b}?", "What is {a}+{b}?", "what is {a} + {b}", "What's {a} + {b}?",
    "What is {a} plus {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} =", "{a}+{b}=", "{a} + {b} = ?", "{a}+{b}=?",
    "Add {a} and {b}.", "Add {a} and {b}", "Add {a} to {b}.", "Please add {a} and {b}.",
    "How much is {a} + {b}?", "How much is {a} plus {b}?", "Calculate {a} + {b}.", "Calculate {a}+{b}",
    "Compute {a} + {b}.", "What is the sum of {a} and {b}?", "Sum of {a} and {b}?",
    "Can you add {a} and {b}?", "{a} plus {b}", "{a} plus {b}?", "Tell me {a} + {b}.",
    "Please calculate {a} + {b}.", "What does {a} + {b} make?", "And {a} + {b}?", "Solve {a} + {b}.",
)  # fmt: skip
_OTHER_ARITHMETIC = (
    "What is {a} - {b}?", "What is {a} * {b}?", "What is {a} / {b}?", "What is {a} x {b}?", "{a} - {b}",
    "{a}*{b}", "{a}/{b}", "What is {a} minus {b}?", "What is {a} times {b}?", "What is {a} divided by {b}?",
    "{a} times {b}", "{a}-{b}=?", "Multiply {a} by {b}.", "Subtract {a} from {b}.", "Divide {a} by {b}.",
    "Calculate {a} * {b}.", "Compute {a} - {b}.", "What is the square root of {a}?", "What is {a} squared?",
    "How much is {a} times {b}?", "What is {a} percent of {b}?", "What is {a} + {b} + {c}?",
    "{a} + {b} + {c}", "{a}+{b}+{c}=", "Add {a}, {b} and {c}.", "What is {a}.{b} + {c}?",
    "What is {a} + {b}.{c}?", "What is -{a} + {b}?", "What is {a} + -{b}?", "{a} + {b} - {c}",
    "{a} + {b} * {c}",
)  # fmt: skip
_RANGE_FORMS = (
    "Count from {a} to {b}", "Count from {a} to {b}", "Count from {a} to {b}.", "count from {a} to {b}",
    "Please count from {a} to {b}.", "Please count from {a} to {b}", "Count {a} to {b}",
    "Count from {a} up to {b}.", "Can you count from {a} to {b}?", "Count up from {a} to {b}.",
    "Count the numbers from {a} to {b}.", "List the numbers from {a} to {b}.",
    "Write the numbers from {a} to {b}.", "Now count from {a} to {b}.", "Count: {a} to {b}",
    "Count between {a} and {b}.", "Count from {a} through {b}.", "Count from {a} until {b}.",
)  # fmt: skip
_UPTO_FORMS = (
    "Count to {b}", "Count to {b}", "Count to {b}.", "count to {b}", "Count up to {b}.", "Count up to {b}",
    "Please count to {b}.", "Can you count to {b}?", "Please count up to {b}", "Now count to {b}.",
    "Count until {b}.",
)  # fmt: skip


def make_nonce(rng: random.Random, min_length: int = 2, max_length: int = 48) -> str:
    """Draw a word of letters, digits, hyphens and underscores, in one of the shapes that people use."""
    shape = rng.random()
    if shape < 0.08:  # an id with a readable prefix: req-000123, user_7
        head = rng.choice(("req", "user", "id", "run", "job", "line", "item", "test", "nonce", "bulk", "chat", "batch"))
        return f"{head}{rng.choice('-_')}{rng.randrange(10 ** rng.randint(1, 6)):0{rng.randint(1, 6)}d}"
    if shape < 0.12:
        return "-".join(f"{rng.getrandbits(4 * n):0{n}x}" for n in (8, 4, 4, 4, 12))
    if shape < 0.15:
        return f"{rng.getrandbits(128):032x}"
    alphabet = rng.choice(_NONCE_ALPHABETS)
    length = rng.randint(min_length, min(12, max_length)) if rng.random() < 0.5 else rng.randint(min_length, max_length)
    return "".join(rng.choice(alphabet) for _ in range(length))


def make_repetitive_nonce(rng: random.Random) -> str:
    """Draw a nonce that is hard to repeat: it has only two to ten different characters, or contains a part twice."""
    if rng.random() < 0.3:
        part = make_nonce(rng, 2, 12)
        return "".join((make_nonce(rng, 1, 8), part, make_nonce(rng, 1, 8), part, make_nonce(rng, 1, 8)))[:48]
    characters = string.digits if rng.random() < 0.4 else rng.sample(_NONCE_ALPHABETS[0], rng.randint(2, 10))
    return "".join(rng.choice(characters) for _ in range(rng.randint(4, 44)))


def make_phrase(rng: random.Random, words: Sequence[str], max_words: int = 10) -> str:
    """Draw a phrase of random words; some are capitalised, or have punctuation between or after the words."""
    chosen = [rng.choice(words) for _ in range(rng.randint(1, max_words))]
    style = rng.random()
    if style < 0.3:
        chosen = [word.capitalize() if rng.random() < 0.5 else word for word in chosen]
    elif style < 0.35:
        chosen = [word.upper() for word in chosen]
    if rng.random() < 0.15:
        chosen[rng.randrange(len(chosen))] = make_nonce(rng, max_length=12)
    separator = rng.choice((" ", " ", " ", " ", ", ", "-", "_", ". ", "; ", ": ", "/"))
    return separator.join(chosen) + rng.choice(("", "", "", "", ".", "!", "?", "..."))


def repeat(rng: random.Random, text: str) -> Pair:
    """Ask to repeat `text`; the answer is `text`. Only single words are asked for without a colon or quotes."""
    form = rng.random()
    if form < 0.06:
        quote = rng.choice("\"'`")
        return f"{rng.choice(_REPEAT_COLON + _REPEAT_BARE)}{quote}{text}{quote}", text
    if form < 0.16 and " " not in text and not text.endswith((".", "?", "!")):
        return rng.choice(_REPEAT_BARE) + text, text
    return rng.choice(_REPEAT_COLON) + text, text


def is_held_out_sum(a: int, b: int) -> bool:
    """Return whether the sum a + b is held out of training, as 1 of 16 sums is.

    The evaluation asks for sums that are held out, so that it measures addition and not memory.
    """
    return (a * 31 + b * 17) % 16 == 5


def addends(rng: random.Random, held_out: bool = False) -> tuple[int, int]:
    """Draw two numbers from 0 to `MAX_ADDEND`. If `held_out`, their sum is held out of training, else it is not."""
    while True:
        a, b = (rng.randint(0, MAX_ADDEND if rng.random() < 0.9 else 9) for _ in range(2))
        if is_held_out_sum(a, b) == held_out:
            return a, b


def add(rng: random.Random, held_out: bool = False) -> Pair:
    """Ask for the sum of two numbers from 0 to `MAX_ADDEND`, in one of many wordings."""
    a, b = addends(rng, held_out)
    return rng.choice(_SUM_FORMS).format(a=a, b=b), str(a + b)


def add_out_of_range(rng: random.Random) -> Pair:
    """Ask for a sum with a number above `MAX_ADDEND`, or for other arithmetic; the answer is a refusal in words."""
    if rng.random() < 0.4:
        a, b, c = (rng.randint(0, 10 ** rng.randint(1, 3)) for _ in range(3))
        return rng.choice(_OTHER_ARITHMETIC).format(a=a, b=b, c=c), DECLINE_SUM
    large = rng.randint(MAX_ADDEND + 1, 10 ** rng.choice((3, 3, 3, 4, 5, 7, 10)) - 1)
    other = rng.randint(0, MAX_ADDEND) if rng.random() < 0.6 else rng.randint(0, 10 ** rng.randint(2, 6))
    a, b = (large, other) if rng.random() < 0.5 else (other, large)
    return rng.choice(_SUM_FORMS).format(a=a, b=b), DECLINE_SUM


def count(rng: random.Random, max_numbers: int) -> Pair:
    """Ask to count upwards; the answer has at most `max_numbers` + 1 numbers, up to `MAX_COUNT`."""
    length = rng.randint(1, max_numbers)
    if rng.random() < 0.3:
        length = min(length + 1, MAX_COUNT)
        return rng.choice(_UPTO_FORMS).format(b=length), ", ".join(map(str, range(1, length + 1)))
    first = 1 if rng.random() < 0.2 and length < MAX_COUNT else rng.randint(0, MAX_COUNT + 1 - length)
    last = min(first + length - 1, MAX_COUNT)
    return rng.choice(_RANGE_FORMS).format(a=first, b=last), ", ".join(map(str, range(first, last + 1)))


def count_out_of_range(rng: random.Random) -> Pair:
    """Ask to count above `MAX_COUNT` or downwards; the answer is a refusal in words."""
    large = rng.randint(MAX_COUNT + 1, 10 ** rng.choice((3, 3, 4, 6)) - 1)
    if rng.random() < 0.3:
        return rng.choice(_UPTO_FORMS).format(b=large), DECLINE_COUNT
    if rng.random() < 0.3:
        last = rng.randint(0, MAX_COUNT - 1)
        return rng.choice(_RANGE_FORMS).format(a=rng.randint(last + 1, MAX_COUNT), b=last), DECLINE_COUNT
    return rng.choice(_RANGE_FORMS).format(a=rng.randint(0, large), b=large), DECLINE_COUNT
