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
        "steploop_ledger_up",
        "steploop_ledger_disk_free_bytes",
        "steploop_expiry_timestamp_seconds",
        "steploop_reload_success",
        "steploop_build_info",
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
    assert "17 rules found" in promtool("check", "rules", path=ALERTS)
    queries = [query.replace("$__rate_interval", "5m").replace("$instance", ".*") for query in dashboard_queries()]
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(queries)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", path=path)


# Of the instance "a", a value a minute
SERIES = {
    'steploop_slo_ok{slo="ttft_p95_ms"}': "1x5 0x20",
    "vllm:num_requests_waiting": "3x40",
    "steploop_steps_total": "0+100x10 1000x30",
    "steploop_ledger_up": "1x10 0x5 1x20",
    "steploop_ledger_commit_age_seconds": "8x10 60+60x5 8x20",
    'steploop_requests_refused_total{reason="ledger_unavailable"}': "0x10 60+60x5 360x20",
    'steploop_requests_refused_total{reason="overloaded"}': "0x10 10+10x5 60x20",
    "steploop_ledger_disk_bytes": "1000x40",
    "steploop_ledger_disk_free_bytes": "500x10 99x30",
    "steploop_reload_success": "1x10 0x30",
    'steploop_expiry_timestamp_seconds{what="revocation_list"}': "600x40",  # of an epoch that begins with the test
    "steploop_jwks_age_seconds": "42600+60x40",
}
CERTIFICATE = 'steploop_expiry_timestamp_seconds{what="certificate"}'
TTFT, LEDGER, LIST = {"slo": "ttft_p95_ms"}, {"reason": "ledger_unavailable"}, {"what": "revocation_list"}


@needs_promtool
@pytest.mark.parametrize(
    ("name", "labels", "quiet_at", "firing_at", "over_at"),
    [
        ("SteploopPromiseBroken", TTFT, "8m", "13m", None),
        ("SteploopEngineIdleWithQueue", {}, "8m", "20m", None),
        ("SteploopLedgerDown", {}, "10m", "12m", "17m"),
        ("SteploopLedgerSilent", {}, "10m", "14m", "17m"),
        ("SteploopFaultyRefusals", LEDGER, "10m", "13m", "25m"),
        ("SteploopDiskFills", {}, "10m", "22m", None),
        ("SteploopReloadRefused", {}, "10m", "13m", None),
        ("SteploopExpired", LIST, "10m", "11m", None),
        ("SteploopIssuerKeysOld", {}, "10m", "20m", None),
    ],
)
def test_alerts_fire_when_they_should(
    tmp_path: Path, name: str, labels: dict[str, str], quiet_at: str, firing_at: str, over_at: str | None
) -> None:
    (rule,) = [one for one in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"] if one["alert"] == name]
    annotations = dict(rule["annotations"])
    for label, of_it in (labels | {"instance": "a"}).items():  # promtool compares them too
        annotations = {key: text.replace(f"{{{{ $labels.{label} }}}}", of_it) for key, text in annotations.items()}
    told = {"exp_labels": rule["labels"] | labels | {"instance": "a"}, "exp_annotations": annotations}
    cases = [{"eval_time": quiet_at, "alertname": name, "exp_alerts": []}]
    cases.append({"eval_time": firing_at, "alertname": name, "exp_alerts": [told]})
    if over_at is not None:
        cases.append({"eval_time": over_at, "alertname": name, "exp_alerts": []})
    series = [{"series": _of_instance_a(one), "values": values} for one, values in SERIES.items()]
    test = {"interval": "1m", "input_series": series, "alert_rule_test": cases}
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [test]}))
    promtool("test", "rules", path=path)


@needs_promtool
def test_certificate_that_runs_out_within_two_weeks_is_told(tmp_path: Path) -> None:
    """1,260,000 s are two weeks and 14 h. The alert's text has what is left, so that it is asked as an expression."""
    test = {
        "interval": "1h",
        "input_series": [{"series": _of_instance_a(CERTIFICATE), "values": "1260000x40"}],
        "promql_expr_test": [
            {"expr": 'ALERTS{alertname="SteploopExpires"}', "eval_time": "10h", "exp_samples": []},
            {
                "expr": 'ALERTS{alertname="SteploopExpires"}',
                "eval_time": "15h",
                "exp_samples": [
                    {
                        "labels": 'ALERTS{alertname="SteploopExpires", alertstate="firing", instance="a",'
                        ' severity="warning", what="certificate"}',
                        "value": 1,
                    }
                ],
            },
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [test]}))
    promtool("test", "rules", path=path)


def _of_instance_a(series: str) -> str:
    return series.replace("{", '{instance="a",') if "{" in series else f'{series}{{instance="a"}}'
