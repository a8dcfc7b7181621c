"""Files that other commands leave in a run folder, in the form in which they do."""

from __future__ import annotations

import json

AUDIT = json.dumps(
    {
        "kept": True,
        "verdict": "KEPT, as far as messages tell",
        "alarms": [],
        "claimed": {"mu": 0.7, "epsilon": 2.0, "delta": 1e-3},
        "one_run": {name: {"mu_lower": 0.65, "epsilon_lower": 1.83} for name in ("fixed", "adaptive")},
        "many_run": {"runs": 400, "mu_lower": 0.4, "epsilon_via_mu": 1.02, "confidence": 0.95},
        "cannot_see": ["how long things take"],
    }
)

TELEMETRY = "round,metric,estimate,low,high,window\n" + "".join(
    f"{r},accuracy,{0.5 + 0.03 * r:.3f},{0.45 + 0.03 * r:.3f},{0.55 + 0.03 * r:.3f},4\n" for r in range(12)
)
