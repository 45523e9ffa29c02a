"""The demo model's answers to greetings, thanks, and all other messages outside of its skills.

Knows only wording. `anything_else` makes up messages on all kinds of subjects. Their answer is always the same text,
which says what the model is.
"""

import random
import string
from collections.abc import Sequence

from demo_model.training.skills import Pair

INTRODUCTION = (
    "I am Tidegate's demo model: a very small model that can answer questions about Tidegate, repeat text, count, "
    "and add small numbers. Use --model to serve a real one."
)
GREETING = "Hello! I am Tidegate's demo model. Ask me about Tidegate, or let me repeat, count or add something."
WELCOME = "You are welcome."
GOODBYE = "Goodbye!"

_GREETINGS = (
    "Hi", "Hello", "Hey", "Hello there", "Hi there", "Hey there", "Good morning", "Good evening",
    "Good afternoon", "Good day", "Greetings", "Hello Tidegate", "Hi Tidegate", "Hello, how are you?",
    "How are you?", "Hi, how are you today?", "Hello world", "Hello, world!", "Hey, what's up?", "Howdy",
    "Hello, are you there?", "Is anybody there?", "Are you there?", "hello?", "ping", "Nice to meet you.",
    "Say hello.", "Say hi.", "Hello, who is there?",
)  # fmt: skip
_THANKS = (
    "Thanks", "Thank you", "Thank you very much", "Thanks a lot", "Many thanks", "Great, thanks",
    "OK, thank you", "Perfect, thanks", "Thanks for your help", "That helps, thank you", "Cool, thanks",
    "Good, thank you", "Well done", "Great", "Very good", "Nice",
)  # fmt: skip
_GOODBYES = (
    "Bye",
    "Goodbye",
    "Good bye",
    "See you",
    "See you later",
    "Good night",
    "Bye bye",
    "OK, bye",
    "Until tomorrow",
)
_WHO = (
    "Who are you?", "What are you?", "What can you do?", "What do you do?", "Help", "Help me.",
    "Can you help me?", "I need help.", "What is your name?", "Are you a human?", "Are you an AI?",
    "Are you ChatGPT?", "Are you GPT?", "Are you a robot?", "What can I ask you?", "What do you know?",
    "Tell me about yourself.", "Introduce yourself.", "What are your skills?", "Who made you?",
    "How can you help me?", "What else can you do?", "Can you do anything else?", "test", "Test",
    "This is a test.", "Testing", "OK", "Yes", "No", "Why?", "How?", "What?", "Really?", "Are you sure?",
    "I do not understand.", "Go on.", "Continue.", "Are you smart?", "Do you speak German?",
    "Hallo, wie geht es dir?", "Bonjour", "Hola, que tal?", "Was ist das?", "What day is it?",
    "What time is it?", "Where are you?", "How old are you?", "Do you like me?", "Tell me a joke.",
    "Sing a song.", "Tell me a story.", "Write a poem.", "Write a story.", "Write a haiku.",
    "Translate this.", "What is the meaning of life?",
)  # fmt: skip
_SUBJECTS = (
    "What is the {w} of {n}?", "What is a {w}?", "What is the {w}?", "What is {w}?", "Who is {n}?",
    "Who was {n} {n}?", "Where is {n}?", "When was {n} born?", "Write a poem about the {w}.",
    "Write a story about a {w} and a {w}.", "Write a {w} in Python.", "How do I {w} a {w}?",
    "How do I make {w}?", "How do you {w}?", "Why is the {w} so {w}?", "Why do {w}s {w}?",
    "Translate {w} to German.", "Translate the {w} {w} into French.", "Summarize the {w} of {n}.",
    "Explain {w} {w} to me.", "Explain the {w}.", "Tell me about {n}.", "Tell me about the {w}.",
    "Describe a {w}.", "What is the capital of {n}?", "Who invented the {w}?", "Who wrote {n}?",
    "Who won the {w} in {y}?", "What happened in {y}?", "Is a {w} a {w}?", "Is {n} {w}?", "Can a {w} {w}?",
    "Do you like {w}?", "Do you have a {w}?", "I like {w} and {w}.", "I have a {w}.", "My {w} is {w}.",
    "The {w} is {w}.", "The {w} {w} the {w} {w}.", "My name is {n}.", "I am {n}.", "I am {w}.",
    "Give me a recipe for {w}.", "Give me {d} {w}s.", "List {d} kinds of {w}.", "Name {d} {w}s.",
    "What colour is a {w}?", "How many {w}s are in a {w}?", "How far is {n}?", "How big is a {w}?",
    "How much does a {w} cost?", "Which {w} is {w}?", "What rhymes with {w}?", "Spell {w}.",
    "Sort {w}, {w} and {w}.", "Reverse the word {w}.", "Solve the {w}.", "Fix my {w}.",
    "Write a letter to {n}.", "Write {d} words about {w}.", "Write code for a {w}.",
    "Write an essay on {w} {w}.", "Please {w} the {w}.", "{w}", "{w} {w}", "{w} {w} {w} {w}", "{n}", "{n}?",
    "{w}?", "{w}!", "What does {w} mean?", "Define {w}.", "What is the best {w} in {n}?",
    "What is the population of {n}?", "Should I {w} my {w}?", "What is {n}'s {w}?",
    "How is the weather in {n}?", "What is the weather today?", "Where can I buy a {w}?", "Draw a {w}.",
    "Imagine a {w}.", "You are a {w}.", "Act as a {w}.", "Let us talk about {w}.",
    "What do you think about {w}?", "import {w}", "def {w}({w}):", "for {w} in {w}:", "SELECT {w} FROM {w};",
    "{d}", "{d}.{d}", "print({w})", "https://{w}.com/{w}", "{w}@{w}.com",
)  # fmt: skip
_NAMES = (
    "France", "Germany", "Spain", "Italy", "Japan", "China", "India", "Brazil", "Canada", "Egypt", "Paris",
    "London", "Berlin", "Rome", "Madrid", "Tokyo", "New York", "Alice", "Bob", "Einstein", "Newton",
    "Shakespeare", "Napoleon", "Mozart", "Anna", "Peter", "Mary", "John", "Python", "Linux", "Google",
    "Amazon", "Mars", "Jupiter", "Europe", "Africa", "Asia", "Poland", "Sweden", "Norway",
)  # fmt: skip
_ENDINGS = ("", "", ".", "!", "?", "!!", " :)")


def greet(rng: random.Random) -> Pair:
    """Draw a greeting, a thank-you or a goodbye, and its answer."""
    asked, answer = rng.choice(
        ((_GREETINGS, GREETING), (_GREETINGS, GREETING), (_THANKS, WELCOME), (_GOODBYES, GOODBYE))
    )
    text = rng.choice(asked)
    if text[-1] not in ".?!":
        text += rng.choice(_ENDINGS)
    return (text.lower() if rng.random() < 0.3 else text), answer


def anything_else(rng: random.Random, words: Sequence[str]) -> Pair:
    """Draw a message that is about something else or makes no sense; the answer is the introduction."""
    kind = rng.random()
    if kind < 0.2:
        text = rng.choice(_WHO)
    elif kind < 0.88:
        text = _fill(rng, rng.choice(_SUBJECTS), words)
        if kind < 0.35:
            text += " " + _fill(rng, rng.choice(_SUBJECTS), words)
    else:
        text = _gibberish(rng)
    return (text.lower() if rng.random() < 0.25 else text), INTRODUCTION


def _fill(rng: random.Random, form: str, words: Sequence[str]) -> str:
    while "{w}" in form:
        form = form.replace("{w}", rng.choice(words), 1)
    while "{n}" in form:
        form = form.replace("{n}", rng.choice(_NAMES) if rng.random() < 0.7 else rng.choice(words).capitalize(), 1)
    return form.replace("{d}", str(rng.randint(1, 100))).replace("{y}", str(rng.randint(1000, 2030)))


def _gibberish(rng: random.Random) -> str:
    """Draw a text without meaning, of ASCII characters or letters of other scripts."""
    kind = rng.random()
    if kind < 0.4:
        alphabet = string.ascii_letters + "  "
    elif kind < 0.6:
        alphabet = string.ascii_letters + string.digits + string.punctuation.replace("<", "") + "   "
    elif kind < 0.8:
        alphabet = "äöüßéèñçàêîøåæ" + string.ascii_lowercase + "  "
    else:
        first = rng.choice((0x0391, 0x0410, 0x05D0, 0x0627, 0x0905, 0x3042, 0x4E00, 0xAC00, 0x1F600))
        alphabet = "".join(chr(first + offset) for offset in range(24)) + " ?"
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 40))).strip() or "?"
