"""The usual parameter groups for Muon: hidden matrices, and the rest for AdamW."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from longshore.optim.rules.adam import AdamFamily
from longshore.optim.rules.muon import MatrixFamily, Split, matrix_layout

_HEADS = ("lm_head", "head", "output", "output_layer", "classifier", "score", "unembed", "unembedding", "embed_out")
"""Names of the modules that compute what a model returns, in libraries and in scripts."""
_FUSED = ("qkv", "query_key_value", "c_attn", "in_proj", "gate_up", "fused", "weight_ih_l", "weight_hh_l")
"""Parts of names of parameters that hold several matrices."""


def muon_groups(
    model: nn.Module,
    *,
    split: Mapping[str, Split | Mapping[str, Any]] | None = None,
    others: Sequence[str] = (),
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    show: bool = True,
) -> list[dict[str, Any]]:
    """Return the usual groups of a model for :class:`~longshore.Muon`, and print them.

    Muon steps the matrices; AdamW steps embeddings, the head (also one that is tied to an embedding) and everything of
    another shape. Norms, biases and other vectors have no weight decay. Frozen parameters are in no group.

    Args:
        model: the model.
        split: which parameters hold several matrices: patterns of parameter names (``"*.qkv.weight"``, as in a shell;
            the first that fits counts, and one with a star leaves vectors out, such as biases), each with what a group
            of :class:`~longshore.Muon` has as its ``split``, or with a dictionary of ``split`` and ``split_dim``. None:
            a name that looks so is one matrix nevertheless.
        others: patterns of the names of further parameters that AdamW is to step, also where a pattern of ``split``
            with a star fits them.
        muon: options of the groups of matrices, such as ``{"lr": 0.02}``.
        adamw: options of the other groups.
        show: print a line for each group.

    Raises:
        TypeError: ``model`` is no module, or one of the others is no dictionary, or no list.
        ValueError: a pattern fits no parameter; ``split`` names a parameter and ``others`` fits it, too; or a parameter
            looks as if it held several matrices, and neither says what to do with it.
    """
    _check_types(model, others, split=split, muon=muon, adamw=adamw)
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    options_of = matrix_options(model, named, split or {}, others)
    matrices: dict[str, tuple[dict[str, Any], list[tuple[str, Tensor]]]] = {}
    tables: list[tuple[str, Tensor]] = []
    vectors: list[tuple[str, Tensor]] = []
    for name, parameter in named.items():
        options = options_of[name]
        if options is None:
            (vectors if parameter.ndim < 2 else tables).append((name, parameter))
        else:
            matrices.setdefault(repr(options), (options, []))[1].append((name, parameter))
    adamw = dict(adamw or {})
    for given, known in ((muon or {}, MatrixFamily.options), (adamw, AdamFamily.options)):
        if unknown := given.keys() - known.keys():
            raise ValueError(f"{', '.join(sorted(unknown))} is no option; there are {', '.join(known)}")
    groups = [
        {"params": members, "use_muon": True, **(muon or {}), **options} for options, members in matrices.values()
    ]
    if tables:
        groups.append({"params": tables, "use_muon": False, **adamw})
    if vectors:
        groups.append({"params": vectors, "use_muon": False, **adamw, "weight_decay": 0.0})
    if show:
        show_groups(groups)
    return groups


def _check_types(model: object, others: object, **dictionaries: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"muon_groups takes a model, a torch.nn.Module, not {type(model).__name__}")
    for name, given in dictionaries.items():
        if not isinstance(given, (Mapping, type(None))):
            raise TypeError(f"{name} is a dictionary, not {given!r}")
    if isinstance(others, str):
        raise TypeError(f"others is a list of patterns, such as [{others!r}], not a string")


def show_groups(groups: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each group of :class:`~longshore.Muon` whose members have names."""
    for group in groups:
        print(_line(group))


def matrix_options(
    model: nn.Module,
    named: Mapping[str, Tensor],
    split: Mapping[str, Split | Mapping[str, Any]],
    others: Sequence[str],
    marks: Mapping[str, bool] | None = None,
    where: str = "in longshore.muon_groups()",
) -> dict[str, dict[str, Any] | None]:
    """Return by name the options ``split`` and ``split_dim`` of each parameter that Muon is to step, and None for each
    that AdamW is to step.

    Args:
        model: the model; it says which parameters are of embeddings and of the head.
        named: the parameters.
        split: as in :func:`muon_groups`.
        others: as in :func:`muon_groups`.
        marks: by name, whether Muon steps a parameter. None: that follows from the model.
        where: where the user gives these two, for errors.

    Raises:
        ValueError: as in :func:`muon_groups`.
    """
    used = {pattern for pattern in split for name, each in named.items() if _divides(pattern, name, each)}
    used |= {pattern for pattern in others for name in named if fnmatch.fnmatchcase(name, pattern)}
    for pattern in (*split, *others):
        if pattern not in used:
            close = difflib.get_close_matches(pattern, named, 1, 0.0)
            raise ValueError(
                f"{pattern!r} is the name of no trained parameter of the model; it stands {where}, and there is "
                f"{', '.join(close) or 'none'}"
            )
    outer = _embeddings_and_heads(model)
    found: dict[str, dict[str, Any] | None] = {}
    for name, parameter in named.items():
        fits = ((pattern, how) for pattern, how in split.items() if _divides(pattern, name, parameter))
        pattern, how = next(fits, (name, _UNSAID))
        other = False
        for fitting in (each for each in others if fnmatch.fnmatchcase(name, each)):
            if name in split:
                raise ValueError(
                    f"parameter {name} has a split {where}, which Muon steps by, and others={[fitting]} leaves it to "
                    "AdamW: take it out of one of them"
                )
            other = True
        if how is _UNSAID and marks is None:
            # A matrix of one row or column is a vector, such as the magnitudes of weight_norm.
            other |= id(parameter) in outer or parameter.ndim not in (2, 3) or 1 in parameter.shape[-2:]
        if other or (marks is not None and not marks[name]):
            found[name] = None
        else:
            found[name] = _options_of(how, name, parameter, where, pattern)
    return found


_UNSAID = object()


def _divides(pattern: str, name: str, parameter: Tensor) -> bool:
    """Return whether a pattern of ``split`` is for a parameter: one with a star leaves vectors out, such as biases."""
    return fnmatch.fnmatchcase(name, pattern) and (parameter.ndim > 1 or pattern == name)


def _embeddings_and_heads(model: nn.Module) -> set[int]:
    """Return the ``id`` of each parameter of an embedding or of the model's head."""
    found = [each for each in model.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag))]
    # Names with a number are of blocks, in which BERT, for one, has modules called output.
    named = ((name.split("."), module) for name, module in model.named_modules())
    found += [module for path, module in named if path[-1] in _HEADS and not any(map(str.isdigit, path))]
    output = getattr(model, "get_output_embeddings", lambda: None)()  # of transformers
    found += [output] if isinstance(output, nn.Module) else []
    return {id(parameter) for module in found for parameter in module.parameters()}


def _options_of(how: Any, name: str, parameter: Tensor, where: str, pattern: str) -> dict[str, Any]:
    """Return the options ``split`` and ``split_dim`` of a group for a parameter, which ``pattern`` fits."""
    said = f"say split={{{name!r}: ...}} {where}, or others=[{name!r}] for AdamW"
    if how is _UNSAID:
        if parameter.ndim == 3:
            raise ValueError(
                f"parameter {name} is {list(parameter.shape)}: a stack of matrices ('stack'), or none; {said}"
            )
        if parameter.ndim == 2 and any(part in name.lower() for part in _FUSED):
            raise ValueError(
                f"parameter {name}, {list(parameter.shape)}, looks as if it held several matrices; {said} (a number of "
                "blocks, their sizes, or None if it is one matrix)"
            )
        return {}
    options = dict(how) if isinstance(how, Mapping) else {} if how is None else {"split": how}
    if unknown := options.keys() - {"split", "split_dim"}:
        raise ValueError(f"split={{{name!r}: ...}} has split and split_dim, and no {', '.join(sorted(unknown))}")
    try:
        matrix_layout(tuple(parameter.shape), options.get("split"), options.get("split_dim", 0))
    except ValueError as error:
        fits = f"; split={{{pattern!r}: ...}} {where} fits it, and others=[{name!r}] leaves it to AdamW"
        raise ValueError(f"parameter {name} {error}{'' if pattern == name else fits}") from None
    return options


def _line(group: Mapping[str, Any]) -> str:
    """Describe a group."""
    members = group["params"]
    numel = sum(parameter.numel() for _, parameter in members)
    kind = "Muon " if group["use_muon"] else "AdamW"
    options = ", ".join(f"{name}={value}" for name, value in group.items() if name not in ("params", "use_muon"))
    names = ", ".join(name for name, _ in members[:3]) + (", ..." if len(members) > 3 else "")
    return f"{kind}  {len(members):4} tensors  {numel:14,} elements  {f'({options})  ' if options else ''}{names}"
