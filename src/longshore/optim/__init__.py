"""``torch.optim.Optimizer`` drop-ins built from a store and a transfer."""

from longshore.optim.adagrad import Adagrad
from longshore.optim.adam import Adam, AdamW
from longshore.optim.lion import Lion
from longshore.optim.offload import Offload
from longshore.optim.sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion", "Offload"]
