"""The fixtures of tests/launch, for the commands start scripts too."""

from tests.launch.conftest import launch, plain_environment, script, start

__all__ = ["launch", "plain_environment", "script", "start"]
