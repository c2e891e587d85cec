"""What Grafana and the alerts ask for is there to be asked for, and their queries are PromQL."""

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.types import EngineStats
from server.observing.metrics import Metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "alerts.yaml"
OURS = re.compile(r"\b(?:steploop_|vllm:|process_)[a-z0-9_]+")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus"
)


def shown() -> set[str]:
    """Names that can be asked for."""
    page = Metrics().render(EngineStats(), 0, 0, Counter()).decode()
    names: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return names


def panels() -> list[dict[str, Any]]:
    return list(json.loads((DEPLOY / "grafana.json").read_text())["panels"])


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", ())]


def alert_queries() -> list[str]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule["expr"] for rule in group["rules"]]


@pytest.mark.parametrize("queries", [dashboard_queries, alert_queries], ids=["dashboard", "alerts"])
def test_every_metric_that_is_asked_for_is_shown(queries: Any) -> None:
    asked = {name for query in queries() for name in OURS.findall(query)}
    assert asked
    assert asked <= shown()


def test_dashboard_shows_what_operators_ask_for() -> None:
    asked = {name for query in dashboard_queries() for name in OURS.findall(query)}
    wanted = {
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "steploop_slo_ok",
        "steploop_prefix_cache_evictions_total",
        "steploop_step_rows_sum",
        "steploop_step_tokens_bucket",
        "steploop_step_seconds_bucket",
        "steploop_loop_lag_seconds_bucket",
        "steploop_gil_wait_seconds_bucket",
        "steploop_requests_refused_total",
        "steploop_stage_seconds_bucket",
        "steploop_tenant_completion_tokens_total",
        "steploop_tenant_queue_seconds_total",
        "steploop_device_utilization_ratio",
        "process_resident_memory_bytes",
    }
    assert wanted <= asked


def test_panels_have_a_place_of_their_own() -> None:
    taken = [
        (x, y)
        for panel in panels()
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    assert len({panel["id"] for panel in panels()}) == len(panels())


def promtool(*arguments: str | Path, path: Path) -> str:
    result = subprocess.run(["promtool", *arguments, path], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@needs_promtool
def test_prometheus_takes_the_alerts_and_the_dashboards_queries(tmp_path: Path) -> None:
    assert "8 rules found" in promtool("check", "rules", path=ALERTS)
    queries = [query.replace("$__rate_interval", "5m").replace("$instance", ".*") for query in dashboard_queries()]
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(queries)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", path=path)


@needs_promtool
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    def fires(name: str, at: str, labels: dict[str, str]) -> dict[str, Any]:
        return {"eval_time": at, "alertname": name, "exp_alerts": [{"exp_labels": {"severity": "warning"} | labels}]}

    series = {
        'steploop_slo_ok{instance="a",slo="ttft_p95_ms"}': "1x5 0x20",
        'vllm:num_requests_waiting{instance="a"}': "3x40",
        'steploop_steps_total{instance="a"}': "0+100x10 1000x30",
    }
    cases = [
        {"eval_time": "8m", "alertname": "SteploopPromiseBroken", "exp_alerts": []},
        fires("SteploopPromiseBroken", "13m", {"instance": "a", "slo": "ttft_p95_ms"}),
        {"eval_time": "8m", "alertname": "SteploopEngineIdleWithQueue", "exp_alerts": []},
        fires("SteploopEngineIdleWithQueue", "20m", {"instance": "a", "severity": "critical"}),
    ]
    for case in cases:
        for alert in case["exp_alerts"]:  # promtool compares them too
            (rule,) = [
                rule
                for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
                if rule["alert"] == case["alertname"]
            ]
            alert["exp_annotations"] = {
                key: text.replace("{{ $labels.instance }}", "a").replace("{{ $labels.slo }}", "ttft_p95_ms")
                for key, text in rule["annotations"].items()
            }
    test = {"interval": "1m", "input_series": [{"series": s, "values": v} for s, v in series.items()]}
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [test | {"alert_rule_test": cases}]}))
    promtool("test", "rules", path=path)
