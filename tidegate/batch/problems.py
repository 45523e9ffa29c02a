"""The exception for what a user of `tidegate batch` can mend."""


class BatchProblem(Exception):
    """Something that the user can mend. The message is one sentence that says what is wrong and what to do."""
