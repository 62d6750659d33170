"""Every kind of reason that a plan may hold."""

from __future__ import annotations

from effcompile.core import findings, mask, reasons
from effcompile.core.reasons import Reason

#: kind → its class: what a plan.json may hold.
KINDS: dict[str, type[Reason]] = {
    "because": reasons.Because,
    "unsupported": reasons.Unsupported,
    "slower": reasons.Slower,
    "not faster": reasons.NotFaster,
    "not smaller": reasons.NotSmaller,
    "over budget": reasons.OverBudget,
    "over error": reasons.OverError,
    "within gap": reasons.WithinGap,
    "no kernel": reasons.NoKernel,
    "not allowed": reasons.NotAllowed,
    "requires": reasons.Requires,
    "needed": reasons.Needed,
    "not measured": reasons.NotMeasured,
    "gains": reasons.Gains,
    "faster": reasons.Faster,
    "kept": reasons.Kept,
    "frees": reasons.Frees,
    "divided": reasons.Divided,
    "sees": mask.Sees,
    "stays dense": mask.StaysDense,
    "only where": mask.OnlyWhere,
    "sparse speed": reasons.SparseSpeed,
    "recall": reasons.Recall,
    "together": findings.Together,
    "failed": findings.Failed,
    "not built": findings.NotBuilt,
    "corrected": findings.Corrected,
    "host use": findings.HostUse,
    "unmeasured": findings.Unmeasured,
    "padding": findings.Padding,
    "equals": findings.Equals,
    "of": findings.Of,
    "cosine": findings.Cosine,
    "nats": findings.Nats,
    "errors alike": findings.AlikeErrors,
    "token rates": findings.TokenRates,
}
