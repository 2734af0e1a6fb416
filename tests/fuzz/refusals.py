"""Errors that longshore's documentation announces where plain PyTorch goes on. Any other is a finding."""

from __future__ import annotations

import re

from longshore.errors import ParameterError

REFUSALS = {
    "gradient on the host is touched": r"its gradient is on the host",
    "zero_grad fills": r"zero_grad\(set_to_none=False\) fills \.grad with zeros",
    "GradScaler with released gradients": r"GradScaler cannot see gradients that release_gradients=True moved",
    "clipped twice": r"clip_grad_norm_ was already called in this window",
    "changed after clipping": r"changed after optimizer\.clip_grad_norm_\(\) had measured it",
    "interrupted backward": r"a backward was interrupted while it accumulated the gradient",
    "taken out too late": r"was taken out of its group after its gradient had left for the host",
    "foreign placeholder": r"is a placeholder that does not stand for its gradient of this window",
    "save with gradients on the host": r"gradients? .*would be (lost|applied to the loaded weights)",
    "window under way": r"^(a checkpoint has no gradients, and )?those of the window under way would be",
    "state of a parameter that was taken out": r"no parameter group here has them: their state would be lost",
    "copied after clipping": r"which are not copied: copy or pickle the optimizer after step",
    "option out of range": r"^(lr must be a number of at least 0|Invalid learning rate)",
    "not in the groups": r"not a parameter of this optimizer",
    "state of another shape": r"not a dense float tensor",
    "state of another name": r"unknown state '\w+'; longshore keeps",
    "twice in the groups": r"is in the parameter groups twice; keep it in one place",
    "failed backward": r"a backward of this window failed|a gradient was not taken during|rank \d+ failed in this",
    "accumulation steps within a window": r"gradient_accumulation_steps was to change .* in the middle of a window",
    "raw backwards are not counted": r"which the engine does not count, and gradient_accumulation_steps is",
    "raw backward without the loss scale": r"gradients came from loss.backward\(\) without the loss scale",
    "wrong configuration": r"^the file is refused: ",
    "AdamW's group of Muon with momentum": r"has been given a momentum, which AdamW does not read",
    "a matrix in another kind of Muon's groups": r"was laid out as .*, and its group makes it",
    # Of streamed models: docs/streaming.md, "What is refused".
    "autocast of a streamed model": r"^autocast keeps its casts of parameters",
    "copied while streamed": r"is streamed, and a copy would stream the parameters of this one",
    "replaced while streamed": r"was replaced after longshore\.stream",
    "class and method changed at once": r"was replaced after longshore\.stream\(\.\.\.\), and its class got another",
    "full backward hook while streamed": r"has a full backward hook, or one before its backward, which "
    r"would not find the gradients",
    "written in a hook of a streamed model": r"was written to in a hook of a module inside",
    "written since a forward that is computed again": r"been modified by an inplace operation since forward",
    "added while streamed": r"came after longshore\.stream",
    "a parameter outside of its block's forward": r"^Expected all tensors to be on the same device",
    "other memory since forward": r"was given other memory \(p\.data = \.\.\.\) since forward",
    "state deleted": r"is part of the optimizer's state and cannot be deleted",
}


OF_ADAGRAD = {"Adagrad's states before its first step": r"^'(step|sum)'$"}
OF_A_STEP = {"a vector in a group of Muon's": r"and Muon steps matrices: put it into a group with use_muon=False"}
"""Both sides raise a ValueError where such a group is made."""
AFTER_ONE_RANKS_ERROR = {"ranks apart": r"^the ranks do different things: .* is in step\(\), .* is in backward"}


def refusal_of(failure: BaseException, kind: str, uneven: bool = False) -> str | None:
    """The name of the refusal, None if it is none.

    Args:
        failure: what our side raised.
        kind: the name of its optimizer.
        uneven: an error was raised on some ranks alone before.
    """
    text, known = str(failure), REFUSALS | (AFTER_ONE_RANKS_ERROR if uneven else {})
    known |= OF_ADAGRAD if kind == "Adagrad" else {}
    known |= OF_A_STEP if isinstance(failure, ParameterError) else {}
    return next((name for name, pattern in known.items() if re.search(pattern, text)), None)
