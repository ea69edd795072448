"""Print the differences between a manifest and what the published models of Kubeflow Trainer keep of it, as JSON.

The models leave out keys that they do not know, so a key that is missing afterwards is no key of a TrainJob.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from kubeflow_trainer_api import models


def paths(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by path."""
    if isinstance(value, dict):
        items = [(f"{path}.{key}", item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{number}]", item) for number, item in enumerate(value)]
    else:
        return {path: value}
    return {leaf: item for name, child in items for leaf, item in paths(child, name).items()}


def main() -> None:
    written = yaml.safe_load(Path(sys.argv[1]).read_text())
    job = models.TrainerV1alpha1TrainJob.from_dict(written)
    kept = paths(job.to_dict())
    print(json.dumps([path for path, value in paths(written).items() if kept.get(path) != value]))


if __name__ == "__main__":
    main()
