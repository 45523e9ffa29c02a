"""`tidegate demo`: start everything on free ports, show what it does, print a table."""

import sys

from openai import OpenAIError

from tidegate.demo.fleet import show_fleet
from tidegate.demo.one_server import show_one_server
from tidegate.demo.parts import DemoError
from tidegate.settings.commands import DemoSettings
from tidegate.valkey import ValkeyError


def run_demo(settings: DemoSettings) -> int:
    """Run the demo. Return the exit code."""
    try:
        (show_fleet if settings.fleet else show_one_server)(settings)
    except (DemoError, OpenAIError, ValkeyError) as error:
        print(f"tidegate demo: {error}", file=sys.stderr)
        return 1
    return 0
