"""Secure aggregations: each turns evidence into a label, and proves when no patch can change it."""

from patchguard.defenses.base import Defense
from patchguard.defenses.cell_masking import CellMasking
from patchguard.defenses.clipped_sum import ClippedSum
from patchguard.defenses.double_masking import DoubleMasking
from patchguard.defenses.majority_vote import MajorityVote
from patchguard.defenses.masked_agreement import MaskedAgreement
from patchguard.defenses.order_statistics import Median, TrimmedMean
from patchguard.defenses.robust_masking import RobustMasking
from patchguard.defenses.undefended import Undefended

__all__ = [
    "CellMasking",
    "ClippedSum",
    "Defense",
    "DoubleMasking",
    "MajorityVote",
    "MaskedAgreement",
    "Median",
    "RobustMasking",
    "TrimmedMean",
    "Undefended",
]
