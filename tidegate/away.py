"""What the commands that call a running server say when it does not answer: `tidegate top` and `tidegate batch`."""

# By a part of the error's text: what else may be wrong than a server that does not run.
REASONS = {
    "CERTIFICATE_VERIFY_FAILED": "Its certificate is not trusted here: set SSL_CERT_FILE to a file with the one that "
    "signed it.",
    "WRONG_VERSION_NUMBER": "It speaks no TLS there: its URL begins with http://.",
    "RECORD_LAYER_FAILURE": "It speaks no TLS there: its URL begins with http://.",
    "disconnected without sending a response": "If it has a certificate, its URL begins with https://.",
}
USUAL = "Is the server running, and is --base-url right?"


def away(url: str, error: BaseException) -> str:
    """Return the sentences for a server that does not answer. `error` is that of httpx, or has it as its cause."""
    text = str(error.__cause__ or error)
    reason = next((reason for part, reason in REASONS.items() if part in text), USUAL)
    return f"{url} does not answer. {reason}"
