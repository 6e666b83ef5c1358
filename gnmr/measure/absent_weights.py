"""Weights that are not in memory until a module runs: offloaded by accelerate, or sharded over processes by FSDP2.

Both libraries bring the weights of a module before its forward pass and take them away afterwards. A diagnosis lets
them do it, so it holds no more than a pass of the model holds. Only what is read outside of a pass is fetched here:

    accelerate    parameters are on the meta device, and a hook of their module (`_hf_hook`) has a map of their values
    FSDP2         parameters are DTensors between passes, and plain tensors while their module runs

Each process of a sharded model needs the same batches: a pass gathers weights, and nothing else is exchanged. Each of
them then computes the same numbers.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.conversion import ConvertedModel
from gnmr.conversion.converting import tensor_parallel
from gnmr.conversion.reads import is_sharded
from gnmr.options import require

_FSDP1 = "is wrapped by FullyShardedDataParallel (FSDP1), which flattens its parameters; use FSDP2 (fully_shard)"
_NO_WEIGHTS = "has parameters on the meta device; load its weights (gnmr.diagnose takes weights=FOLDER of a checkpoint)"


def _offloading_hook(module: nn.Module) -> Any:
    """Return accelerate's hook that takes the weights of a module away after each pass, or None."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", [hook])  # a SequentialHook has several
    return next((hook for hook in hooks if getattr(hook, "offload", False)), None)


def is_offloaded(module: nn.Module) -> bool:
    """Return whether a hook of accelerate brings the module's weights when it runs, and takes them away afterwards.

    Args:
        module: a module, whose own parameters alone are meant, and not those of its submodules.
    """
    return _offloading_hook(module) is not None


def has_absent_weights(model: nn.Module) -> bool:
    """Return whether any module's weights are in memory, or whole, only while it runs."""
    return any(map(is_offloaded, model.modules())) or any(map(is_sharded, model.parameters()))


def refuse_unreadable(model: nn.Module) -> None:
    """Raise ValueError if weights are neither in memory nor brought by accelerate or FSDP2."""
    name = type(model).__name__
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # not imported: no model uses FSDP
    flattened = fsdp is not None and any(
        isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()
    )
    require(not flattened, "model", name, _FSDP1)
    # A module's hook brings the parameters of the module itself.
    by_module = ((module, p) for module in model.modules() for p in module.parameters(recurse=False))
    missing = any(parameter.is_meta and not is_offloaded(module) for module, parameter in by_module)
    require(not missing, "model", name, _NO_WEIGHTS)


def refuse_tensor_parallel(model: nn.Module) -> None:
    """Refuse a model of which no pass has a whole parameter.

    Raises:
        ValueError: a parameter is sharded other than by FSDP2, which gathers it when its module runs.
    """
    if any(map(is_sharded, model.parameters())):
        sharded = tensor_parallel(model)
        right = f"has {sharded} sharded by tensor parallelism, in which no operator has paths; use FSDP2 (fully_shard)"
        require(sharded is None, "model", type(model).__name__, right)


def device_of_passes(model: nn.Module) -> torch.device | None:
    """Return the device to which accelerate brings offloaded weights; None: nothing is offloaded.

    Raises ValueError if there are several.
    """
    hooks = [hook for module in model.modules() if (hook := _offloading_hook(module)) is not None]
    devices = list(dict.fromkeys(torch.device(hook.execution_device) for hook in hooks))
    right = f"runs on several devices ({', '.join(map(str, devices))}); load it with a device_map of one and offloading"
    require(len(devices) <= 1, "model", type(model).__name__, right)
    return devices[0] if devices else None


def settle(converted: ConvertedModel, model: nn.Module) -> None:
    """Put what the operators of a model share on the device of its passes, if their weights come when they run.

    Args:
        converted: the operators.
        model: the model that holds them. If nothing is offloaded, its first parameter with values gives the device.
    """
    around = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
    device = device_of_passes(model) or next(around, None)
    if device is not None and converted.device.type == "meta":
        converted.shared.move_from_meta(device)


@contextmanager
def with_weights(module: nn.Module) -> Iterator[None]:
    """Keep the offloaded weights of a module and its submodules in memory, so that several passes read them once.

    Args:
        module: any module; nothing happens to weights that accelerate does not offload.
    """
    held: list[tuple[nn.Module, Any]] = []
    try:
        for submodule in module.modules():
            if (hook := _offloading_hook(submodule)) is not None:
                hook.pre_forward(submodule)
                hook.offload = False
                held.append((submodule, hook))
        yield
    finally:
        for submodule, hook in held:
            hook.offload = True
            hook.post_forward(submodule, None)


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that is sharded over processes; others as they are.

    Args:
        tensor: a tensor of any shape. If it is a DTensor, all processes call this together.
    """
    if not is_sharded(tensor):
        return tensor
    whole: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return whole


def parameter_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values) of each parameter, one after the other, wherever its values are."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        hook = _offloading_hook(module)
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                values = parameter if hook is None or not parameter.is_meta else hook.weights_map[key]
                yield f"{path}.{key}".lstrip("."), gathered(values)


def put_away(model: nn.Module) -> None:
    """Take away the weights that passes left: FSDP2 keeps those of its outermost module, a failed pass its own."""
    for module in model.modules():
        sharded: Any = module
        if hasattr(module, "unshard"):
            sharded.reshard()
        hook = _offloading_hook(module)
        if hook is not None and not all(parameter.is_meta for parameter in module.parameters(recurse=False)):
            hook.post_forward(module, None)


def refuse_other_batches(model: nn.Module, batches: Iterable[Any], key: str = "batches") -> None:
    """Compare the batches of the processes of a sharded model, which need the same ones.

    All processes call this together. Tensors, numbers and texts are compared, and objects of other kinds are not.

    Raises:
        ValueError: the batches differ; raised in all processes.
    """
    parameters: Iterable[Any] = model.parameters()
    meshes = {parameter.device_mesh for parameter in parameters if is_sharded(parameter)}
    if not meshes:
        return
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(b"batch")
        _add_to(digest, batch)
    for mesh in meshes:
        for group in mesh.get_all_groups():
            digests: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(digests, digest.hexdigest(), group)
            right = "differ between the processes of a sharded model; give each process the same ones"
            require(len(set(digests)) == 1, key, "...", right)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, in the order of its elements."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def _add_to(digest: Any, tree: Any) -> None:
    """Add the numbers and words of a batch to a digest; objects of other kinds say nothing."""
    if isinstance(tree, Tensor):
        digest.update(f"{tree.dtype} {tuple(tree.shape)}".encode())
        digest.update(bytes_of(tree).cpu().numpy().data)
    elif isinstance(tree, Mapping):
        for name, branch in tree.items():
            digest.update(f"{name}".encode())
            _add_to(digest, branch)
    elif isinstance(tree, list | tuple):
        for branch in tree:
            _add_to(digest, branch)
    elif isinstance(tree, int | float | str):
        digest.update(f"{tree} ".encode())
