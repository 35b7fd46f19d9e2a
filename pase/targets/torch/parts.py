"""`Part`: a submodule of a module under a plan, in place of the user's submodule.

It has the submodule's parameters, buffers and attributes, and supports the same indexing. It computes nothing: the
plan's program computes the layers, wherever their parameters are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import getattr_static
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from pase.errors import ProgramError

_PLAIN_MODULE = frozenset(nn.Module().__dict__)
"""Attributes of every module."""

_METHODS = (FunctionType, BuiltinFunctionType, MethodType, staticmethod, classmethod)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Original:
    """Description of a submodule of the user's module.

    Attributes:
        kind: Its class.
        attributes: Its own attributes, except those that contain modules or parameters.
        children: Names of its children, in order.
    """

    kind: type
    attributes: Mapping[str, Any]
    children: tuple[str, ...]

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Original":
        return self

    def attribute(self, name: str, of: nn.Module) -> Any:
        """Return an attribute; AttributeError for one that it does not have, or that is a method.

        of: The module that has its parameters and attributes, which properties are computed of.
        """
        if name in self.attributes:
            return self.attributes[name]
        found = getattr_static(self.kind, name, None)
        if isinstance(found, property) and found.fget is not None:
            return found.fget(of)
        has_none = found is None and not hasattr(self.kind, name)
        if has_none or isinstance(found, _METHODS) or hasattr(found, "__get__"):
            what = "attribute" if has_none else "method"
            raise AttributeError(
                f"{self.kind.__name__!r} under a plan has no {what} {name!r}; it has the parameters, buffers and "
                "attributes of the module"
            )
        return found


def originals(module: nn.Module) -> dict[str, Original]:
    """Return descriptions of a module and of all of its submodules, by their paths."""
    return {
        path: Original(
            kind=type(part),
            attributes={
                name: value
                for name, value in part.__dict__.items()
                if name not in _PLAIN_MODULE and not _holds_tensors(value)
            },
            children=tuple(part._modules),
        )
        for path, part in module.named_modules(remove_duplicate=False)
    }


def _holds_tensors(value: Any) -> bool:
    """Return whether a value refers to a module or a parameter, and would keep its memory alive."""
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_holds_tensors, value))
    if isinstance(value, torch.Tensor):
        return value.requires_grad or isinstance(value, nn.Parameter)
    return isinstance(value, nn.Module) or isinstance(getattr(value, "__self__", None), nn.Module)


class Resembling(nn.Module):
    """A module that falls back to the attributes of another one."""

    _original: Original | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original")
            if original is None or name.startswith("__"):
                raise
            return original.attribute(name, self)


class Part(Resembling):
    """A part of a module under a plan."""

    def __init__(self, original: Original | None = None) -> None:
        super().__init__()
        self._original = original

    def forward(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise ProgramError(
            f"{self._called()} is a part of a module under a plan, and computes nothing by itself: call the whole "
            "module, and have it return what you need"
        )

    def train(self, mode: bool = True) -> NoReturn:
        raise ProgramError(
            f"{self._called()} is a part of a module under a plan, whose mode is that of the whole module: set that, "
            f"or have the part {'in training' if mode else 'in evaluation'} before the module is searched"
        )

    def __len__(self) -> int:
        return len(self._names())

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        names = self._names()
        is_named = self._original is not None and issubclass(self._original.kind, nn.ModuleDict | nn.ParameterDict)
        return iter(names) if is_named else iter([self._item(name) for name in names])

    def keys(self) -> list[str]:
        """Return the keys of a submodule that is a dict."""
        return self._names()

    def values(self) -> list[Any]:
        """Return the values of a submodule that is a dict."""
        return [self._item(name) for name in self._names()]

    def items(self) -> list[tuple[str, Any]]:
        """Return the items of a submodule that is a dict."""
        return [(name, self._item(name)) for name in self._names()]

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __getitem__(self, index: Any) -> Any:
        names = self._names()
        if isinstance(index, slice):
            return [self._item(name) for name in names[index]]
        if isinstance(index, str):
            if index not in names:
                raise KeyError(index)
            return self._item(index)
        return self._item(names[index])

    def _item(self, name: str) -> Any:
        return getattr(self, name)

    def _names(self) -> list[str]:
        """Return the names of a container's children; TypeError where it is neither a list nor a dict."""
        original = self._original
        if original is not None and issubclass(original.kind, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            return list(original.children)
        if original is not None and issubclass(original.kind, nn.ParameterList | nn.ParameterDict):
            return list(self._parameters)
        raise TypeError(f"{self._called()} contains no parts that could be counted or indexed")

    def _called(self) -> str:
        return "This" if self._original is None else f"This {self._original.kind.__name__}"

    def _refuse_hook(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise ProgramError(
            f"{self._called()} is a part of a module under a plan, which computes nothing by itself: a hook would "
            "never be called. Register it on the whole module, or have the module return what it is to see; gradients "
            "of parameters are seen by parameter.register_hook"
        )

    register_forward_hook = register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = _refuse_hook
    register_backward_hook = _refuse_hook


def check_hooks(module: nn.Module) -> list[str]:
    """Return notes on the hooks that parts of a module have.

    Raises:
        ProgramError: A hook would see or change a gradient, which no program does.
    """
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ProgramError(
                f"parameter {name!r} has a hook, which is of this tensor alone: register it on the parameter of the "
                "module that parallelize returns"
            )
    notes = []
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise ProgramError(
                f"module {path or type(module).__name__!r} has a backward hook, which a module under a plan would "
                "never call; remove it, or register it on the module that parallelize returns"
            )
        if part._forward_hooks or part._forward_pre_hooks:
            notes.append(
                f"the forward hooks of module {path or type(module).__name__!r} are traced with it: what they compute "
                "of tensors is in every step, what they do otherwise is done once"
            )
    return notes
