"""A small evaluation with figures to check by hand: two domains, one law, batches of 1 and 8."""

from typing import Any

from draftsmith.eval.report import FORMAT
from draftsmith.eval.request_rows import Overlap, RequestRow, Timed

LAW = "T=0"
SMALL = {"v": {"1": 1.0, "2": 1.2, "3": 1.4}, "c_first": 0.1, "c": 0.05, "o": 0.05, "o_plain": 0.0}
LARGE = {"v": {"1": 2.0, "2": 3.2, "3": 4.4}, "c_first": 0.3, "c": 0.2, "o": 0.1, "o_plain": 0.0}
MEMORY = {
    "target_weights": 2.0**30,
    "drafter_weights": 2.0**28,
    "target_kv": 2.0**20,
    "drafter_kv": 2.0**18,
}


def figure(value: float, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high}


def cell(domain: str, overlap: float, mass: float) -> dict[str, Any]:
    """Four timed prompts of 0.5 seconds of prefill, 0.6 with the drafter."""
    speed = {
        "prompts": 4, "plain_prefill_seconds": 0.5, "speculative_prefill_seconds": 0.6,
        "predicted": 1.1, "speedup": figure(1.2, 1.05, 1.35),
    }  # fmt: skip
    return {
        "domain": domain, "law": LAW, "overlap": figure(overlap), "captured_mass": mass,
        "speed": speed,
    }  # fmt: skip


def sweep(domain: str, s: tuple[float, float], measured: list[dict[str, Any]]) -> dict[str, Any]:
    taus = [1 + s[0], 1 + sum(s)]
    return {
        "domain": domain,
        "law": LAW,
        "num_draft_tokens": [1, 2],
        "tokens_per_round_estimated": [
            figure(taus[0], taus[0] - 0.1, taus[0] + 0.1),
            figure(taus[1], taus[1] - 0.4, taus[1] + 0.4),
        ],
        "survival_estimated": [[s[0]], list(s)],
        "predicted": [],
        "measured": measured,
    }


def entry(batch: int, cost: dict[str, Any]) -> dict[str, Any]:
    domains = [
        {"domain": name, "num_draft_tokens": 2, "predicted": 1.0, "groups": 0, "measured": None}
        for name in ("chat", "math")
    ]
    return {"batch": batch, "law": LAW, "seconds": 0.1, "cost": cost, "domains": domains}


def report() -> dict[str, Any]:
    chat = [{"num_draft_tokens": 2, **figure(1.2, 1.05, 1.35)}]
    return {
        "format": FORMAT,
        "settings": {"num_draft_tokens": 2, "policy": None},
        "cells": [cell("chat", 0.6, 0.65), cell("math", 0.8, 1.0)],
        "sweep": [sweep("chat", (0.6, 0.3), chat), sweep("math", (0.8, 0.6), [])],
        "batches": [entry(8, LARGE), entry(1, SMALL)],
        "memory": MEMORY,
    }


def rows() -> list[RequestRow]:
    """Four replies of each domain to prompts of 10, 20, 30 and 40 tokens, all timed."""
    return [
        RequestRow(
            domain, LAW, f"{domain}{i}", 0, f"{domain}{i}|0", 0, 10 * i, "", 20 + i, "stop", "",
            ((2, 1),), Overlap(1.0, 2), None, Timed(1.0, 20.0, 0.8, 20.0),
        )
        for domain in ("chat", "math")
        for i in (1, 2, 3, 4)
    ]  # fmt: skip
