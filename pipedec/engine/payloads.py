"""Verdicts as JSON, for the task payloads that ranks exchange through Redis."""

from __future__ import annotations

from pipedec.core import Share, Verdict


def verdict_to_payload(verdict: Verdict) -> dict[str, object]:
    return {
        "tokens": list(verdict.tokens),
        "finished": verdict.finished,
        "forecast": list(map(list, verdict.forecast)),
        "shares": list(map(list, verdict.shares)),
    }


def verdict_from_payload(payload: dict) -> Verdict:
    forecast, shares = payload.get("forecast", ()), payload.get("shares", ())
    return Verdict(
        tuple(payload["tokens"]), payload.get("finished"), tuple(map(tuple, forecast)), tuple(Share(*s) for s in shares)
    )
