"""``torch.optim.Optimizer`` drop-ins built from a store and copy streams."""

from longshore.optim.offload import Offload
from longshore.optim.rules.adagrad import Adagrad
from longshore.optim.rules.adam import Adam, AdamW
from longshore.optim.rules.lion import Lion
from longshore.optim.rules.muon import Muon, muon_groups
from longshore.optim.rules.sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion", "Muon", "Offload", "muon_groups"]
