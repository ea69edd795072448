"""Kubernetes: a manifest for Kubeflow, which starts the pods and tells torch elastic in each where the others are."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from zeroengine.errors import LaunchError
from zeroengine.launch.cluster.hosts import limit
from zeroengine.launch.local.masking import is_secret

KINDS = ("PyTorchJob", "TrainJob")
MAX_LABEL = 63


def manifest(
    kind: str,
    name: str,
    image: str | None,
    nnodes: str,
    nproc: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    cpu: bool = False,
    restarts: int = 0,
) -> tuple[str, list[str]]:
    """YAML for `kubectl apply -f -`, and what the user should know about it.

    Args:
        kind: `PyTorchJob` of Kubeflow's training operator, or `TrainJob` of Kubeflow Trainer 2.
        image: has Python, torch, zeroengine and the script.
        nnodes: `N`, or `MIN:MAX` for an elastic PyTorchJob.
        nproc: of each pod; on GPUs as many are asked for.
        words: the script and its arguments.

    Raises:
        LaunchError: something that the manifest needs is missing.
    """
    if image is None:
        raise LaunchError(
            "--launcher k8s: which image? Name one that has torch, zeroengine and the script with --image"
        )
    if not nproc.isdecimal():
        raise LaunchError("--launcher k8s: how many processes has a pod? Write --nproc 8, for 8 GPUs each")
    match = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        limit([], nnodes)  # says what is wrong
    label, notices = job_name(name, kind, high)
    secret = f"{label}-env"
    variables: list[dict[str, Any]] = []
    for key, value in environment.items():
        if is_secret(key, value):
            notices.append(
                f"{key} looks secret and is not in the manifest: the pods take it from the Secret {secret}. Make it "
                f"with kubectl create secret generic {secret} --from-env-file=FILE, of a file with a line {key}=..."
            )
            variables.append({"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
        else:
            variables.append({"name": key, "value": literal(value)})
    resources = {} if cpu else {"limits": {"nvidia.com/gpu": int(nproc)}}
    # torchrun has a syntax of its own for ${local_rank}, in which $$ stands for $ as well.
    command = ["python", "-m", "torch.distributed.run", *(literal(word.replace("$", "$$")) for word in words)]
    if kind == "TrainJob":
        if low < high:
            raise LaunchError(f"--nnodes {nnodes}: a TrainJob has one number of nodes. Write --nnodes {high}")
        if restarts:
            raise LaunchError(
                f"--max-restarts {restarts}: a TrainJob has no number of restarts, its runtime has (failurePolicy of "
                "the TrainingRuntime's JobSet). Leave --max-restarts out, or write --kind PyTorchJob"
            )
        trainer: dict[str, Any] = {"image": image, "command": command, "numNodes": high, "numProcPerNode": int(nproc)}
        trainer |= {"env": variables} if variables else {}
        trainer |= {"resourcesPerNode": resources} if resources else {}
        body: dict[str, Any] = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
        return _dump("trainer.kubeflow.org/v1alpha1", kind, label, body), notices
    container = {"name": "pytorch", "image": image, "command": command, "env": variables, "resources": resources}
    container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
    pod = {
        "restartPolicy": "OnFailure" if restarts else "Never",
        "containers": [{key: value for key, value in container.items() if value}],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    body = {"nprocPerNode": nproc, "runPolicy": {"backoffLimit": restarts, "cleanPodPolicy": "Running"}}
    if low < high:
        body["elasticPolicy"] = {
            "rdzvBackend": "c10d",
            "minReplicas": low,
            "maxReplicas": high,
            "maxRestarts": restarts,
        }
        body["pytorchReplicaSpecs"] = {"Worker": {"replicas": high, "template": {"spec": pod}}}
    else:
        body["pytorchReplicaSpecs"] = {"Master": {"replicas": 1, "template": {"spec": pod}}}
        if high > 1:
            body["pytorchReplicaSpecs"]["Worker"] = {"replicas": high - 1, "template": {"spec": pod}}
    return _dump("kubeflow.org/v1", kind, label, body), notices


def job_name(name: str, kind: str, nodes: int) -> tuple[str, list[str]]:
    """Make a name that Kubernetes takes of a script's, and say so where it is not recognised easily.

    Kubeflow names the service of each pod after the job. That is a label of DNS (RFC 1035): 63 characters at most,
    small letters, digits and hyphens, with a letter first.
    """
    label = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    if not label[:1].isalpha():
        label = f"train-{label}".strip("-")
    last_pod = f"-worker-{nodes - 1}" if kind == "PyTorchJob" else f"-node-0-{nodes - 1}"
    longest = MAX_LABEL - len(last_pod)
    if len(label) <= longest:
        return label, []
    different = f"-{zlib.crc32(label.encode()):08x}"  # two long names may begin alike
    short = label[: longest - len(different)].rstrip("-") + different
    return short, [
        f"the job is called {short}: Kubernetes leaves {longest} characters for the name, {name} is too long"
    ]


def literal(text: str) -> str:
    """The text where Kubernetes would put variables in place of $(NAME), and $ in place of $$."""
    return text.replace("$", "$$")


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _dump(version: str, kind: str, name: str, spec: dict[str, Any]) -> str:
    tree = {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)
