"""Print manifests for Kubeflow, which starts the pods and tells torch elastic in each where the others are."""

from __future__ import annotations

import copy
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from zeroengine.errors import LaunchError
from zeroengine.launch.cluster.hosts import parse_nnodes
from zeroengine.utils.masking import is_secret

MAX_LABEL_LENGTH = 63


def build_manifest(
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
    """Return YAML for `kubectl apply -f -`, and notices for the user.

    Args:
        kind: `PyTorchJob` of Kubeflow's training operator, or `TrainJob` of Kubeflow Trainer 2.
        name: The job's name, from which one that Kubernetes accepts is made.
        image: The container image, with Python, torch, zeroengine and the script.
        nnodes: `N`, or `MIN:MAX` for an elastic PyTorchJob.
        nproc: The processes of each pod; without `cpu`, also its GPUs.
        words: The script and its arguments.
        environment: The ranks' variables. Secret ones are taken from a Secret and not written down.
        cpu: Whether to ask for no GPUs.
        restarts: How often Kubernetes may start the ranks again.

    Raises:
        LaunchError: Something that the manifest needs is missing.
    """
    if image is None:
        raise LaunchError(
            "--launcher k8s: which image? Name one that has torch, zeroengine and the script with --image"
        )
    if not nproc.isdecimal():
        raise LaunchError("--launcher k8s: how many processes has a pod? Write --nproc 8, for 8 GPUs each")
    low, high = parse_nnodes(nnodes)
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
            # Kubernetes expands $(NAME), and $$ to $.
            variables.append({"name": key, "value": value.replace("$", "$$")})
    resources = {} if cpu else {"limits": {"nvidia.com/gpu": int(nproc)}}
    # torchrun expands ${local_rank} as well, with $$ for a plain $, so every $ is escaped once for each of them.
    command = ["python", "-m", "torch.distributed.run", *(word.replace("$", "$$$$") for word in words)]
    # A TrainJob names the runtime of the cluster, which brings everything that is not written here.
    if kind == "TrainJob":
        if low < high:
            raise LaunchError(f"--nnodes {nnodes}: a TrainJob has one number of nodes. Write --nnodes {high}")
        if restarts:
            raise LaunchError(
                f"--max-restarts {restarts}: a TrainJob has no number of restarts, its runtime has (failurePolicy of "
                "the TrainingRuntime's JobSet). Leave --max-restarts out, or write --kind PyTorchJob"
            )
        trainer = {"image": image, "command": command, "numNodes": high, "numProcPerNode": int(nproc)}
        # Versions of Trainer start one process in a pod that has limits and no requests, whatever numProcPerNode says.
        resources = {"requests": dict(resources["limits"]), **resources} if resources else {}
        trainer |= {"env": variables, "resourcesPerNode": resources}
        trainer = {key: value for key, value in trainer.items() if value}
        body: dict[str, Any] = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
        return _dump("trainer.kubeflow.org/v1alpha1", kind, label, body), notices
    container = {"name": "pytorch", "image": image, "command": command, "env": variables, "resources": resources}
    container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
    pod = {
        "restartPolicy": "OnFailure" if restarts else "Never",
        "containers": [{key: value for key, value in container.items() if value}],
        # A container has 64 MiB of /dev/shm by default, too little for data loaders and for ranks that share memory.
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    body = {"nprocPerNode": nproc, "runPolicy": {"backoffLimit": restarts, "cleanPodPolicy": "Running"}}
    if low < high:
        limits = {"minReplicas": low, "maxReplicas": high, "maxRestarts": restarts}
        body["elasticPolicy"] = {"rdzvBackend": "c10d", **limits}
    replicas = {"Worker": high} if low < high else {"Master": 1, "Worker": high - 1}
    # Copies keep YAML from writing the second pod as an alias, which people who edit a manifest do not expect.
    body["pytorchReplicaSpecs"] = {
        kind: {"replicas": count, "template": {"spec": copy.deepcopy(pod)}} for kind, count in replicas.items() if count
    }
    return _dump("kubeflow.org/v1", kind, label, body), notices


def job_name(name: str, kind: str, nodes: int) -> tuple[str, list[str]]:
    """Return a job name that Kubernetes accepts, and a notice if it had to be shortened.

    Kubeflow names the service of each pod after the job. Such a name is a label of DNS (RFC 1035): at most 63 small
    letters, digits and hyphens, beginning with a letter.

    Args:
        name: The script's name.
        kind: See `build_manifest`.
        nodes: The number of pods, which number the services.
    """
    # The name is made valid rather than refused, because it comes from the script's file name.
    label = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    if not label[:1].isalpha():
        label = f"train-{label}".strip("-")
    last_pod = f"-worker-{nodes - 1}" if kind == "PyTorchJob" else f"-node-0-{nodes - 1}"
    longest = MAX_LABEL_LENGTH - len(last_pod)
    if len(label) <= longest:
        return label, []
    # Two long names may begin alike, so the shortened one ends in a checksum of the whole name.
    checksum = f"-{zlib.crc32(label.encode()):08x}"
    short = label[: longest - len(checksum)].rstrip("-") + checksum
    return short, [
        f"the job is called {short}: Kubernetes leaves {longest} characters for the name, {name} is too long"
    ]


def _dump(version: str, kind: str, name: str, spec: dict[str, Any]) -> str:
    tree = {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}
    return yaml.safe_dump(tree, sort_keys=False)
