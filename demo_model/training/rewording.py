"""Reword questions with synonyms, openers, closers, careless case and punctuation, and typing errors.

Knows English wording; does not know the answers. All randomness comes from the generator that is passed in.
"""

import random

_OPENERS = (
    "Hi, ", "Hello, ", "Hello! ", "Hey, ", "Hi! ", "Please tell me: ", "Tell me: ", "Can you tell me: ",
    "Quick question: ", "I wonder: ", "So, ", "OK, ", "And ", "Question: ", "Sorry, ", "Please explain: ",
    "Could you tell me: ", "Now: ", "I am new here. ", "Next question: ", "One more question: ",
    "Good morning! ", "I have a question. ",
)  # fmt: skip
_CLOSERS = (
    " Please.",
    " Thanks!",
    " Thank you.",
    " Explain briefly.",
    " Answer in one sentence.",
    " Please explain.",
    " I am new here.",
)
_SYNONYMS = (
    ("How do I", ("How can I", "How would I", "How could I", "How should I", "How does one", "How do you",
        "How do we")),
    ("How do I", ("I want to", "What must I do to", "What do I do to", "Tell me how to",
        "Please tell me how to", "How to")),
    ("How do I", ("What is the way to", "Show me how to", "Explain how to", "Can you tell me how to",
        "Is it possible to")),
    ("What is", ("What's", "What exactly is", "Tell me what is", "Do you know what is",
        "Can you explain what is", "Describe")),
    ("What is", ("Explain", "Please describe", "Could you explain", "Please explain",
        "I want to know what is", "So what is")),
    ("What are", ("Explain", "Describe", "What exactly are", "Tell me what are", "Tell me about")),
    ("What does", ("Tell me what does", "What exactly does", "So what does", "Please explain what does")),
    ("What happens", ("Tell me what happens", "Explain what happens", "So what happens", "What will happen")),
    ("Where is", ("Where's", "Where can I find", "Where do I find", "Tell me where is", "Where do I look for")),
    ("Where are", ("Where can I find", "Where do I find", "Tell me where are", "In which place are")),
    ("Which", ("What", "Tell me which", "And which", "Can you tell me which")),
    ("Can I", ("Is it possible to", "May I", "Could I", "Am I able to", "Can one", "How can I")),
    ("Does it", ("Does Tidegate", "Can it", "Will it", "Does the server")),
    ("the server", ("Tidegate", "the gateway", "this server", "it", "the system")),
    ("Tidegate", ("it", "the server", "this gateway", "the system", "tidegate", "this software", "this")),
    ("is there", ("exist", "do you have", "are available")),
    ("Is there", ("Do you have", "Does Tidegate have", "Does it have", "Is there perhaps")),
    ("start", ("launch", "run", "boot", "bring up")),
    ("stop", ("end", "halt", "terminate", "shut down")),
    ("configured", ("defined", "set", "specified", "set up")),
    ("configure", ("define", "set", "change", "set up", "adjust")),
    ("are there", ("exist", "do you have", "does Tidegate have", "are available", "can be used")),
    ("my ", ("a ", "the ", "our ")),
    ("a request", ("my request", "requests", "the request", "one request")),
    ("a batch", ("my batch", "batches", "the batch", "batch jobs", "a batch job")),
    ("mean", ("stand for", "signify", "tell me")),
)  # fmt: skip


def reword(rng: random.Random, question: str) -> str:
    """Return the same question in other words."""
    for word, others in rng.sample(_SYNONYMS, len(_SYNONYMS)):
        if word in question and rng.random() < 0.25:
            question = question.replace(word, rng.choice(others), 1)
    if rng.random() < 0.3:
        question = question.rstrip(".?!")
    if rng.random() < 0.15:
        question = rng.choice(_OPENERS) + question
    if rng.random() < 0.07:
        question += rng.choice(_CLOSERS)
    if rng.random() < 0.06:
        question = _mistype(rng, question)
    case = rng.random()
    return question.lower() if case < 0.2 else question.upper() if case < 0.21 else question


def _mistype(rng: random.Random, text: str) -> str:
    """Return `text` with one typing error: a letter is dropped or doubled, or two letters are swapped."""
    at = rng.randrange(len(text) - 1)
    replacement = rng.choice(("", text[at] * 2, text[at + 1] + text[at]))
    return text[:at] + replacement + text[at + (2 if len(replacement) == 2 and replacement[0] != text[at] else 1) :]
