"""The stable name of `patchguard.defenses.evidence`."""

from patchguard.defenses.evidence import Evidence as Evidence
from patchguard.defenses.evidence import EvidenceMap as EvidenceMap
