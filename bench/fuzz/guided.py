"""`python -m bench.fuzz.guided json|multipart`: bytes from a coverage-guided fuzzer into a parser of the gateway.

The fuzzer (atheris, libFuzzer for Python) keeps inputs that reach new lines of the gateway, so it has to be there
before the gateway is imported. After the name of the parser come libFuzzer's own flags and folders.
"""

import logging
import sys


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=["gateway", "python_multipart"]):
        from bench.fuzz.parsers import PARSERS
    logging.disable()  # the library's warnings of what is wrong in a form
    program, parser, *flags = sys.argv
    atheris.Setup([program, *flags], PARSERS[parser])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
