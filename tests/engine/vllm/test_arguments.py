"""What a start with `--engine vllm` refuses before it imports vLLM."""

from importlib import metadata

import pytest

from engine.config import EngineStartError
from engine.vllm import build
from engine.vllm.arguments import OWNED_FLAGS, refuse_owned


@pytest.mark.parametrize("flag", OWNED_FLAGS)
@pytest.mark.parametrize("form", ["--{}", "--{}=1", "--no-{}"])
def test_a_flag_that_the_project_owns_is_refused_by_its_name(flag: str, form: str) -> None:
    with pytest.raises(EngineStartError, match=f"--(no-)?{flag}.*{OWNED_FLAGS[flag].split('(')[0]}"):
        refuse_owned(["--tensor-parallel-size", "2", form.format(flag)])
    with pytest.raises(EngineStartError, match=flag):
        refuse_owned([form.format(flag).replace("-", "_").replace("__", "--", 1)])


def test_other_flags_are_vllms() -> None:
    refuse_owned(["--tensor-parallel-size", "2", "--quantization=fp8", "--distributed-executor-backend", "ray"])


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def find(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(build, "version", find)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.3+cu130"])
def test_the_version_of_the_tests_is_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed(monkeypatch, version)
    build.check_version()


OTHER = r"{} is installed: pip install 'vllm==0\.32\.\*'"


@pytest.mark.parametrize(
    ("version", "message"),
    [
        *((v, OTHER.format(v)) for v in ("0.31.2", "0.33.0", "0.320.0", "1.0")),
        (None, r"pip install 'tidegate\[vllm\]'"),
    ],
)
def test_no_vllm_or_another_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str | None, message: str
) -> None:
    installed(monkeypatch, version)
    with pytest.raises(EngineStartError, match=message):
        build.check_version()
