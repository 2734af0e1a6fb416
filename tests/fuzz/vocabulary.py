"""The statements of training scripts, each with random parts. A word is one function; words belong to a set that can be
switched off (``--without``)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple


class Facts:
    """What a program has so far, as far as the choice of its next statement depends on it."""

    def __init__(
        self,
        dice: random.Random,
        parameters: int,
        kind: str,
        states: tuple[str, ...],
        build: str,
        alone: bool = True,
        engine: bool = False,
        left_out: tuple[str, ...] = (),
    ) -> None:
        self.dice = dice
        self.parameters = parameters
        self.kind = kind
        self.states = states
        self.build = build
        """Expression that builds the optimizer."""
        self.alone = alone
        """Whether a rank may leave out a forward: not where the ranks gather parameters for it."""
        self.engine = engine
        self.left_out = left_out
        """Sets of words that say nothing here."""

    def p(self) -> str:
        return f"p[{self.dice.randrange(self.parameters)}]"

    def seed(self) -> int:
        return self.dice.randrange(10)

    def inputs(self) -> str:
        """Those of a forward after the seed."""
        return self.dice.choice(["", "", ", 1"])

    def call(self) -> str:
        """A forward on each rank's own batch."""
        return f"e({self.seed()} + rank)" if self.engine else f"m({self.seed()}{self.inputs()})"

    def loss(self) -> str:
        one = f"m({self.seed()}{self.inputs()})"
        return self.dice.choice([one, one, one, f"({one} + m({self.seed()}, 1))", f"({one} * 1e3)"])

    def module(self) -> str:
        """One that has parameters."""
        return "m.trunk"

    def inner(self) -> str:
        return self.module()

    def group(self) -> str:
        return f"o.param_groups[{self.dice.choice([0, 0, -1])}]"

    def scale(self) -> float:
        # Each is one of float32: tensors without dimensions are multiplied in float64 on the CPU, and not on a device.
        return self.dice.choice([0.0, 0.5, 3.0, 2.0**-10])


class Word(NamedTuple):
    of: str
    weight: int
    write: Callable[[Facts], str]
    """Returns statements with blank lines between them; empty: none here."""


WORDS: list[Word] = []


def word(of: str, weight: int = 1) -> Callable[[Callable[[Facts], str]], Callable[[Facts], str]]:
    def add(write: Callable[[Facts], str]) -> Callable[[Facts], str]:
        WORDS.append(Word(of, weight, write))
        return write

    return add


def phrases(of: str, weight: int, *templates: str) -> None:
    """Words with a place for each random part: ``{p}``, ``{q}`` (parameters), ``{s}`` (a seed), ``{l}`` (a loss),
    ``{c}`` (a loss of one forward), ``{g}`` (a group), ``{f}`` (a factor), ``{k}`` (a state), ``{t}`` (a module),
    ``{i}`` (a block), ``{n}`` (a module of a block, or beside them)."""

    def write(facts: Facts) -> str:
        text = facts.dice.choice(templates)
        if "{k}" in text and not facts.states:
            return ""
        return text.format(
            p=facts.p(),
            q=facts.p(),
            s=facts.seed(),
            l=facts.loss(),
            c=facts.call(),
            t=facts.module(),
            i=facts.dice.randrange(4),
            n=facts.inner(),
            g=facts.group(),
            f=facts.scale(),
            b=facts.dice.choice([True, False]),
            k=facts.dice.choice(facts.states) if facts.states else "",
            o=facts.build,
        )

    word(of, weight)(write)


phrases("training", 12, "{l}.backward()")
phrases("training", 10, "o.step()")
phrases("training", 6, "o.zero_grad()", "o.zero_grad()", "m.zero_grad()", "o.zero_grad(set_to_none=False)")
phrases("training", 2, "p[:] = list(m.parameters())", "for q in m.parameters():\n    q.grad = None")
phrases(
    "training", 2, "with torch.no_grad():\n    {l}", "with torch.inference_mode():\n    {l}", "m.eval()", "m.train()"
)
phrases("backward", 2, "loss = {l}\nloss.backward(retain_graph=True)\nloss.backward()", "loss = {l}")
phrases("backward", 1, "loss.backward()", "loss.backward(retain_graph=True)")
phrases("backward", 2, "({p} * x({s}, {p})).sum().backward()", "({p}.float() ** 2).sum().backward()")
phrases("backward", 1, "torch.autograd.backward([{l}, {l}])", "torch.autograd.backward({l}, inputs=[{p}])")
phrases("backward", 2, "gradients_of({l}, p)", "gradients_of({l}, [{p}])")
phrases("backward", 1, "({l} * float('inf')).backward()", "({l} * float('nan')).backward()")
phrases("threads", 1, "in_thread(lambda: {l}.backward())", "in_thread(o.step)", "in_thread(o.zero_grad)")
phrases(
    "closures",
    2,
    "def closure():\n    o.zero_grad()\n    loss = {l}\n    loss.backward()\n    return loss\no.step(closure)",
)
phrases("closures", 1, "def closure():\n    loss = {l}\n    loss.backward()\n    return loss\no.step(closure)")
phrases("frozen", 3, "{p}.requires_grad_(False)", "{p}.requires_grad_(True)", "m.requires_grad_(True)")
phrases("gradients", 2, "{p}.grad = None", "{p}.grad = None", "{p}.grad = x({s}, {p})")
phrases(
    "gradients",
    3,
    "{p}.grad.mul_({f})",
    "{p}.grad = {p}.grad * {f}",
    "{p}.grad.zero_()",
    "{p}.grad.data.clamp_(-0.1, 0.1)",
)
phrases("gradients", 1, "torch.nn.utils.clip_grad_value_(p, 0.01)")
phrases("torch's norm", 1, "torch.nn.utils.clip_grad_norm_(p, 0.1)")
phrases("gradients", 1, "for q in p:\n    if q.grad is not None:\n        q.grad *= {f}")
phrases("clipping", 3, "clip(o, {f} or 0.01)", "o.grad_norm() if hasattr(o, 'grad_norm') else None")
phrases("hooks", 2, "h = {p}.register_hook(lambda g: g * {f})", "h = {p}.register_hook(raising(Interrupt))")
phrases("hooks", 1, "h = {p}.register_hook(raising(ValueError))", "h = {p}.register_hook(raising(ValueError, 2))")
phrases("hooks", 1, "h = {p}.register_post_accumulate_grad_hook(raising(Interrupt))")
phrases("hooks", 1, "h = {p}.register_post_accumulate_grad_hook(lambda q: None)", "h.remove()", "h.remove()")
phrases("hooks", 1, "h = {t}.register_forward_hook(raising(Interrupt))")
phrases("hooks", 1, "h = {t}.register_full_backward_hook(raising(Interrupt))")
phrases(
    "hooks", 1, "h = o.register_step_pre_hook(raising(Interrupt))", "h = o.register_step_post_hook(raising(Interrupt))"
)
phrases(
    "groups", 3, "{g}['lr'] = {f}", "{g}['lr'] *= 0.5", "{g}['lr'] = torch.tensor(0.02)", "{g}['weight_decay'] = {f}"
)
phrases("groups", 1, "{g}['maximize'] = True", "{g}['maximize'] = False", "{g}['lr'] = -1.0")
phrases(
    "groups",
    1,
    "{g}.update(betas=(0.5, 0.9)) if 'betas' in {g} else None",
    "{g}.update(eps={f}) if 'eps' in {g} else None",
)
phrases("groups", 1, "{g}.update(momentum=({f} or 2.0) / 4) if 'momentum' in {g} else None")
phrases("groups", 2, "o.add_param_group({{'params': [{p}], 'lr': {f}}})", "o.add_param_group({{'params': [{p}]}})")
phrases(
    "members",
    2,
    "out = {g}['params'].pop()",
    "{g}['params'].append(out)\n\ndel out",
    "{g}['params'].insert(0, out)\n\ndel out",
)
phrases("data", 2, "with torch.no_grad():\n    {p}.copy_(x({s}, {p}))", "with torch.no_grad():\n    {p}.mul_({f})")
phrases(
    "data",
    1,
    "with torch.no_grad():\n    {p}.clamp_(-0.1, 0.1)",
    "with torch.no_grad():\n    {p}.view(-1)[:1].fill_({f})",
)
phrases(
    "data",
    2,
    "{p}.data = x({s}, {p})",
    "{p}.data = {p}.data * {f}",
    "nn.init.constant_({p}, {f})",
    "{p}.data = {p}.data.clone()",
)
phrases("data", 1, "weights = copy.deepcopy(m.state_dict())", "m.load_state_dict(weights)")
phrases("data", 1, "{p}.data, spare = x({s}, {p}), {p}.data", "{p}.data = spare.view({p}.shape)")
phrases("data", 1, "nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(p).to(m.dtype) * {f}, p[1:3])")
phrases(
    "unseen",
    2,
    "{p}.data.clamp_(-0.1, 0.1)",
    "{p}.data.copy_(x({s}, {p}))",
    "{p}.data.fill_({f})",
    "{p}.data.mul_({f})",
)
phrases("unseen", 1, "for q in p:\n    q.data.add_({f})")
phrases("numpy", 1, "{p}.detach().numpy()[...] = {f}")
phrases(
    "state",
    1,
    "if '{k}' in o.state[{p}]:\n    o.state[{p}]['{k}'] = x({s}, {p}).float().abs()",
    "if {p} in o.state:\n    del o.state[{p}]",
    "o.state.pop({p}, None)",
)
phrases(
    "state",
    1,
    "if 'step' in o.state[{p}]:\n    o.state[{p}]['step'] = torch.tensor(3.0)",
    "len(o.state[{p}])",
    "o.state.clear()",
)
phrases(
    "state edits", 2, "o.state[{p}]['{k}'].zero_()", "o.state[{p}]['{k}'].mul_({f})", "o.state[{p}]['step'].zero_()"
)
phrases(
    "state edits", 1, "for s in o.state.values():\n    s['{k}'].zero_()", "kept = o.state[{p}]['{k}']", "kept.zero_()"
)
phrases(
    "state edits",
    1,
    "o.state_dict()['state'][0]['{k}'].zero_()",
    # The dictionaries of torch's are the optimizer's, and get the states of a later step; longshore's are not.
    "sd = o.state_dict()\nsd['state'] = {{key: dict(states) for key, states in sd['state'].items()}}",
    "o.load_state_dict(copy.deepcopy(sd))",
)
phrases("saving", 2, "sd = copy.deepcopy(o.state_dict())", "o.load_state_dict(copy.deepcopy(sd))")
phrases(
    "saving", 2, "o.load_state_dict(copy.deepcopy(o.state_dict()))", "o.load_state_dict(through_file(o.state_dict()))"
)
phrases(
    "saving",
    2,
    "sd = copy.deepcopy(o.state_dict())\n\no = rebuilt(o, lambda: {o})\n\no.load_state_dict(copy.deepcopy(sd))",
)
phrases("saving", 1, "o = rebuilt(o, lambda: {o})", "save = saved(m, o)", "save = saved(m, o)", "loaded(save, m, o)")
phrases(
    "copies",
    2,
    "m, o = copied((m, o))\np[:] = list(m.parameters())",
    "m, o = pickled((m, o))\np[:] = list(m.parameters())",
    "o.load_state_dict(copy.deepcopy(copied(o).state_dict()))",
)
phrases("through torch", 2, "o.load_state_dict(through_torch(o))")
phrases("schedulers", 2, "s.step()", "s.step()", "s.step()", "s.load_state_dict(copy.deepcopy(s.state_dict()))")
phrases("schedulers", 1, "s = torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1))")
phrases(
    "schedulers",
    1,
    "s = torch.optim.lr_scheduler.StepLR(o, 2, 0.3)",
    "s = torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)",
)
phrases("schedulers", 1, "s = torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=9)")
phrases("scaler", 1, "scaler = torch.amp.GradScaler('cpu', init_scale=4.0, growth_interval=2)")
phrases(
    "scaler", 2, "scaler.scale({l}).backward()\n\nscaler.step(o)\n\nscaler.update()", "scaler.scale({l}).backward()"
)
phrases("scaler", 1, "scaler.unscale_(o)", "scaler.step(o)\n\nscaler.update()")
phrases(
    "scaler", 1, "scaler.scale({l} * float('inf')).backward()\n\nscaler.step(o)\n\nscaler.update()\n\no.zero_grad()"
)

# -- of an engine; ``rank`` is 0 on one rank ------------------------------------------------------

phrases("engine", 10, "e.backward(e({s} + rank))", "e.backward(e({s} + rank, 1))", "e.backward(e({s}))")
phrases("engine", 8, "e.step()")
phrases("engine", 2, "e.zero_grad()", "with torch.no_grad():\n    e({s})")
phrases("engine heads", 3, "e.backward(e({s}, rank % 2))", "e.backward(e({s}, 1 - rank % 2))")
phrases("engine heads", 2, "e.backward(e({s}) + e({s} + rank, 1))", "loss = e({s} + rank) * {f}\n\ne.backward(loss)")
phrases("engine idle", 3, "e.backward(e({s}) if rank else nothing())", "e.backward(nothing() if rank else e({s}))")
phrases("engine idle", 1, "e.backward(nothing())", "e.step()", "e.backward(e({s}), scale_wrt_gas=False)")
phrases("engine windows", 2, "e.set_gradient_accumulation_boundary({b})", "e.set_gradient_accumulation_boundary(None)")
phrases("engine windows", 1, "e.set_gradient_accumulation_steps(2)", "e.set_gradient_accumulation_steps(1)")
phrases("engine windows", 2, "with e.no_sync():\n    e.backward(e({s} + rank))")
phrases("engine frozen", 2, "{p}.requires_grad_(False)", "{p}.requires_grad_(True)", "m.requires_grad_(True)")
phrases("engine interrupts", 1, "h = {t}.register_forward_hook(raising(Interrupt))", "h.remove()")
phrases("engine interrupts", 1, "h = {t}.register_full_backward_hook(raising(ValueError))")
phrases("engine groups", 2, "{g}['lr'] = {f}", "{g}['lr'] *= 0.5", "{g}['weight_decay'] = {f}")
phrases("engine raw", 3, "raw(e, e({s} + rank))", "raw(e, e({s} + rank))", "raw(e, e({s}), scaled=False)")
phrases("engine overflow", 2, "e.backward(e({s}) * float('inf'))", "e.backward(e({s} + rank) * 1e30)")
phrases("engine saving", 3, "save = engine_saved(e)", "save = engine_saved(e)", "engine_loaded(save, e)")
phrases("engine saving", 1, "o.load_state_dict(copy.deepcopy(o.state_dict()))")
phrases("engine data", 1, "with torch.no_grad():\n    {p}.mul_({f})", "nn.init.constant_({p}, {f})")

# -- of a streamed model --------------------------------------------------------------------------

phrases("stream between", 4, "with torch.no_grad():\n    see({c})", "with torch.inference_mode():\n    y = {c}")
phrases("stream between", 4, "with torch.no_grad():\n    y = {c}", "see(y)")
phrases("stream between", 6, "{l}.backward()\n\nwith torch.no_grad():\n    y = {c}\n\no.step()\n\nsee(y)")
phrases(
    "stream between",
    2,
    "with torch.no_grad():\n    y = {c}\n\nwith torch.no_grad():\n    {p}.mul_({f})\n\nsee(y)",
    "with torch.no_grad():\n    y = {c}\n\nm.load_state_dict(weights)\n\nsee(y)",
    "with torch.no_grad():\n    y = {c}\n\nsilently({p}.data.zero_)\n\nsee(y)",
)
phrases("stream between", 1, "with torch.no_grad():\n    y = {c}\n\n(({c} - y) ** 2).backward()", "see({l})")
phrases("stream between", 1, "weights = copy.deepcopy(m.state_dict())", "{l}.backward()\n\n{p}.grad.mul_({f})")
phrases("device delays", 3, "delays({s}, 0, 500)", "delays({s}, 20, 50)", "delays({s}, 100, 0)", "delays({s}, 0, 0)")
phrases("device delays", 2, "delays({s}, 0, 3000)", "delays({s}, 1000, 0)", "delays({s}, 500, 500)")
phrases("stream unseen", 2, "silently(lambda: {p}.data.mul_({f}))", "silently(lambda: {p}.data.clamp_(-0.1, 0.1))")
phrases("stream unseen", 1, "silently(lambda: {p}.data.copy_(x({s}, {p})))", "silently(lambda: {p}.data.fill_({f}))")
phrases("stream dropped", 2, "loss = {c}", "loss = None", "{l}", "loss = {c} * float('nan')")
phrases("stream dropped", 1, "m({s}, (0, 9)).backward()", "loss = {l}\nloss.backward()\nloss.backward()")
phrases("stream hooks", 2, "h = {t}.register_forward_pre_hook(clamping)", "h = {n}.register_forward_pre_hook(clamping)")
phrases(
    "stream hooks", 2, "h = {t}.register_full_backward_hook(halving)", "h = {n}.register_full_backward_hook(halving)"
)
phrases("stream hooks", 1, "h = {t}.register_full_backward_hook(weaker)", "h = {n}.register_full_backward_hook(weaker)")
phrases("stream hooks", 1, "h = {t}.register_forward_hook(louder)", "h = m.heads[1].register_forward_hook(louder)")
phrases("stream hooks", 3, "h.remove()")
phrases("stream hooks", 2, "h = {p}.register_post_accumulate_grad_hook(scaling({f}))")
phrases("stream frozen", 3, "{t}.requires_grad_({b})", "{n}.requires_grad_({b})", "m.requires_grad_(True)")
phrases("stream frozen", 1, "m.requires_grad_(False)\n{n}.requires_grad_(True)")
phrases(
    "stream again", 2, "again(m)", "again(m, checkpoint=True)", "again(m, checkpoint='cpu')", "again(m, blocks=150)"
)
phrases("stream changes", 1, "subclassed({t})", "patched({t})", "wrapped({t})", "see(through_a_copy(m, {s}))")
phrases("stream changes", 1, "replaced_head(m)\np[:] = list(m.parameters())", "adapted(m, {i})", "see(bare(m, {s}))")
phrases("stream changes", 1, "m, o = copied((m, o))\np[:] = list(m.parameters())")
phrases("stream changes", 1, "with torch.autocast(torch.device(m.place).type, torch.bfloat16):\n    see({c})")
phrases("stream scaler", 1, "scaler = torch.amp.GradScaler(torch.device(m.place).type, init_scale=4.0)")
phrases("stream scaler", 2, "scaler.scale({l}).backward()\n\nscaler.step(o)\n\nscaler.update()", "scaler.unscale_(o)")
phrases("engine stream between", 4, "with torch.no_grad():\n    see({c})", "with torch.no_grad():\n    y = {c}")
phrases("engine stream between", 4, "e.backward({c})\n\nwith torch.no_grad():\n    y = {c}\n\ne.step()\n\nsee(y)")
phrases("engine stream between", 2, "e.backward({c})", "see(y)", "loss = {c}", "e.backward(loss)")
phrases("engine stream between", 1, "with torch.no_grad():\n    y = {c}\n\n{p}.data.mul_({f})\n\nsee(y)")
phrases("engine device delays", 3, "delays({s}, 0, 500)", "delays({s}, 20, 50)", "delays({s}, 0, 3000)")

SETS = tuple(dict.fromkeys(each.of for each in WORDS))
