"""Deployment files: Ray's schema checked strictly, with lines, and hostile YAML refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.config.problems import Problem
from cluster.deployment.deployment_file import check_file

GOOD = """\
http_options: {host: 127.0.0.1, port: 8000}
applications:
- name: tandem
  import_path: cluster.app:build
  args: {}
  deployments:
  - {name: router}
"""


def check(tmp_path: Path, text: str) -> list[Problem]:
    file = tmp_path / "deploy.yaml"
    file.write_text(text)
    return check_file(file)[1]


@pytest.mark.parametrize(
    ("old", "new", "line", "path", "guess"),
    [
        ("http_options", "http_option", 1, "http_option", "http_options"),
        ("port: 8000", "prt: 8000", 1, "http_options.prt", "port"),
        ("args: {}", "argz: {}", 5, "applications[0].argz", "args"),
        ("{name: router}", "{name: roter}", 7, "applications[0].deployments[0].name", "router"),
        ("router}", "router, num_replicaz: 2}", 7,
         "applications[0].deployments[0].num_replicaz", "num_replicas"),
        ("router}", "router, autoscaling_config: {min_replica: 1}}", 7,
         "applications[0].deployments[0].autoscaling_config.min_replica", "min_replicas"),
        ("args: {}", "args: {pools: {unified: {tensor_paralel: 2}}}", 5,
         "applications[0].args.pools.unified.tensor_paralel", "tensor_parallel"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_found_at_every_level(
    tmp_path: Path, old: str, new: str, line: int, path: str, guess: str
) -> None:
    found = [p for p in check(tmp_path, GOOD.replace(old, new, 1)) if p.message == "unknown key"]
    assert [(p.line, p.path, p.hint) for p in found] == [(line, path, f"did you mean {guess}?")]


AUTOSCALED = """\
http_options: {host: 127.0.0.1, port: 8000}
applications:
- name: tandem
  import_path: cluster.app:build
  autoscaling_policy: {policy_function: "cluster.scaling.serve_policy:ScalingPolicy"}
  args: {scaling: {ttft_s: 0.5, prefill_per_decode: 2.0}}
  deployments:
  - {name: router}
  - name: unified
    autoscaling_config: {min_replicas: 1, max_replicas: 2, upscale_delay_s: 0, downscale_delay_s: 0}
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "path", "message"),
    [
        ("ttft_s", "ttft", 6, "args.scaling.ttft", "unknown key"),
        ("0.5", "0", 6, "args.scaling.ttft_s", "out of range"),
        ("policy_function", "policy_fun", 5, "autoscaling_policy.policy_fun", "unknown key"),
        ("cluster.scaling.serve_policy:ScalingPolicy", "cluster.scaling:Policy", 5,
         "autoscaling_policy.policy_function", "Tandem has no such policy"),
        ('"cluster.scaling.serve_policy:ScalingPolicy"', "[1]", 5,
         "autoscaling_policy.policy_function", "names no function"),
        ('"cluster.scaling.serve_policy:ScalingPolicy"', "''", 5,
         "autoscaling_policy.policy_function", "names no function"),
        ('policy_function: "cluster.scaling.serve_policy:ScalingPolicy"', "policy_kwargs: {}", 5,
         "autoscaling_policy.policy_function", "must be given"),
        ("autoscaling_policy: {p", "# {p", 7, "deployments", "pools are autoscaled without a policy that"),
        ("upscale_delay_s: 0, down", "down", 10, "deployments[1].autoscaling_config.upscale_delay_s",
         "the policy has its own damping"),
        ("max_replicas: 2", "max_replicas: 0", 10, "deployments[1].autoscaling_config.max_replicas", ""),
        ("max_replicas: 2", "max_replicas: 5000", 10, "deployments[1].autoscaling_config.max_replicas",
         "out of range"),
        ("min_replicas: 1", "min_replicas: 0", 6, "args.router.http.group_wait_s", "no pool keeps a group"),
        ("router}", "router, num_replicas: auto}", 8, "deployments[0].num_replicas", "means bounds and"),
        ("router}", "router, autoscaling_config: {max_replicas: 2}}", 8,
         "deployments[0].autoscaling_config", "the router is not autoscaled"),
    ],
)  # fmt: skip
def test_what_an_autoscaled_file_must_say(
    tmp_path: Path, old: str, new: str, line: int, path: str, message: str
) -> None:
    assert check(tmp_path, AUTOSCALED) == []
    found = check(tmp_path, AUTOSCALED.replace(old, new, 1))
    assert any(
        (p.line, p.path) == (line, f"applications[0].{path}") and p.message.startswith(message) for p in found
    ), found


def test_a_pool_may_go_to_zero_when_requests_wait_for_it(tmp_path: Path) -> None:
    waits = AUTOSCALED.replace("args: {", "args: {router: {http: {group_wait_s: 30}}, ")
    assert check(tmp_path, waits.replace("min_replicas: 1", "min_replicas: 0")) == []


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_replica_counts_that_mean_nothing_are_refused(tmp_path: Path, value: str) -> None:
    [problem] = check(tmp_path, GOOD.replace("router}", f"router, num_replicas: {value}}}"))
    assert problem.line == 7
    assert problem.path.startswith("applications[0].deployments[0]")


def test_min_above_max_is_refused_though_ray_takes_any_mapping_there(tmp_path: Path) -> None:
    [problem] = check(tmp_path, AUTOSCALED.replace("min_replicas: 1", "min_replicas: 5"))
    assert "max_replicas (2) must be greater than or equal to min_replicas (5)" in problem.message


def test_a_policy_of_somebody_else_is_taken(tmp_path: Path) -> None:
    assert check(tmp_path, AUTOSCALED.replace("cluster.scaling.serve_policy:", "mine.policies:")) == []


@pytest.mark.parametrize("name", ["a#b", "a\\eb", "a\\u202eb", "a" * 101])
def test_a_name_that_serve_cannot_use_is_refused(tmp_path: Path, name: str) -> None:
    [problem] = check(tmp_path, AUTOSCALED.replace("name: tandem", f'name: "{name}"'))
    assert (problem.line, problem.path) == (3, "applications[0].name")


@pytest.mark.parametrize(
    ("text", "is_right"),
    [("0.5", True), ("3", True), ("1e1", True), ("x", False), ("", False), ("nan", False), ("inf", False)],
)
def test_variables_that_are_read_as_numbers_are_numbers(tmp_path: Path, text: str, is_right: bool) -> None:
    variables = (
        f'{{RAY_SERVE_CONTROL_LOOP_INTERVAL_S: "{text}", RAY_SERVE_MINE: "x", OTHER_S: "x", '
        'RAY_SERVE_REQUEST_LATENCY_BUCKETS_MS: "1,2", RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S: ""}'
    )
    options = f"controller_options: {{runtime_env: {{env_vars: {variables}}}}}\n"
    found = [problem.path.rpartition(".")[2] for problem in check(tmp_path, options + GOOD)]
    assert found == ([] if is_right else ["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"])


def test_a_host_that_others_can_reach_needs_a_word(tmp_path: Path) -> None:
    [problem] = check(tmp_path, GOOD.replace("127.0.0.1", "0.0.0.0"))
    assert (problem.path, problem.got) == ("http_options.host", "'0.0.0.0'")
    assert check_file(tmp_path / "deploy.yaml", allow_open=True)[1] == []
    [problem] = check(tmp_path, GOOD.replace("host: 127.0.0.1, ", ""))
    assert problem.got == "no host, which means 0.0.0.0"


@pytest.mark.parametrize("port", ["80", "0", "70000"])
def test_ports_out_of_range_are_refused(tmp_path: Path, port: str) -> None:
    [problem] = check(tmp_path, GOOD.replace("8000", port))
    assert (problem.path, problem.got) == ("http_options.port", port)


@pytest.mark.parametrize("port", ['"8000"', "8000.0", "true", "null", "010"])
def test_a_port_is_a_whole_number_and_one_mistake(tmp_path: Path, port: str) -> None:
    [problem] = check(tmp_path, GOOD.replace("8000", port))
    assert (problem.line, problem.path) == (1, "http_options.port")


@pytest.mark.parametrize(
    ("old", "new", "path", "message", "got"),
    [
        ("name: router}", "name: router, num_replicas: 1000000000}", "deployments[0].num_replicas",
         "out of range", "1000000000"),
        ("name: router}", "name: router, num_replicas: true}", "deployments[0].num_replicas",
         "input should be a valid integer", "True"),
        ("name: router}", "name: router, max_ongoing_requests: 10000000}",
         "deployments[0].max_ongoing_requests", "out of range", "10000000"),
        ("name: router}", "name: router, health_check_period_s: .inf}",
         "deployments[0].health_check_period_s", "not a finite number", ".inf"),
        ("args: {}", "args: {router: {http: {keep_alive_s: .nan}}}", "args.router.http.keep_alive_s",
         "not a finite number", ".nan"),
        ("{name: router}", "null", "deployments[0]", "an entry is a mapping", "null"),
        ("{name: router}", "[1]", "deployments[0]", "an entry is a mapping", "[1]"),
    ],
)  # fmt: skip
def test_values_that_ray_alone_would_take_or_fail_on(
    tmp_path: Path, old: str, new: str, path: str, message: str, got: str
) -> None:
    [problem] = check(tmp_path, GOOD.replace(old, new))
    assert (problem.path, problem.message, problem.got) == (f"applications[0].{path}", message, got)


def test_a_proxy_location_without_a_proxy_is_refused(tmp_path: Path) -> None:
    [problem] = check(tmp_path, "proxy_location: Disabled\n" + GOOD)
    assert problem.render() == (
        f"{tmp_path}/deploy.yaml:1:proxy_location: nothing would listen on the HTTP port; got 'Disabled'; "
        "allowed: HeadOnly, EveryNode"
    )


def test_loopback_of_version_6_is_refused(tmp_path: Path) -> None:
    [problem] = check(tmp_path, GOOD.replace("127.0.0.1", '"::1"'))
    assert (problem.line, problem.path, problem.allowed) == (1, "http_options.host", "127.0.0.1")


def test_the_same_deployment_twice_is_refused(tmp_path: Path) -> None:
    [problem] = check(tmp_path, GOOD + "  - {name: router}\n")
    assert (problem.line, problem.hint) == (8, "first on line 7")


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        ("placement_group_bundles: [{CPU: 1}]", "computed from pools.<pool>.tensor_parallel"),
        ("placement_group_strategy: SPREAD", "set with pools.<pool>.placement in args"),
        ("user_config: {a: 1}", "what a deployment is told stands in args"),
    ],
)
def test_computed_keys_are_refused(tmp_path: Path, entry: str, hint: str) -> None:
    [problem] = check(tmp_path, GOOD.replace("router}", f"unified, {entry}}}"))
    assert problem.hint == hint


@pytest.mark.parametrize(
    ("prefix", "is_path"),
    [
        ("/", True),
        ("/a/b-c.d_~2/", True),
        ("", False),
        ("a", False),
        ("//", False),
        ("/a//b", False),
        ("/a b", False),
        ("/a?b#c", False),
        ("/{a}", False),
        ("/a\\n  acl x", False),
        ("/\u00e9", False),
    ],
)
def test_a_route_prefix_stands_in_addresses_as_it_is(tmp_path: Path, prefix: str, is_path: bool) -> None:
    problems = check(tmp_path, GOOD.replace("args: {}", f'route_prefix: "{prefix}"'))
    expected = [] if is_path else ["applications[0].route_prefix"]
    assert [problem.path for problem in problems] == expected


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: !!python/object:os.system x\n", 1, "tags are not allowed"),
        ("a: 1\nb: 2\na: 3\n", 3, "the key is given twice"),
        ("a:\n\tb: 1\n", 2, "not valid YAML"),
        ("a: on\n", 1, "YAML readers do not agree"),
        ("a: 010\n", 1, "YAML readers do not agree"),
        ("a: 1:30\n", 1, "YAML readers do not agree"),
        ("a: 2024-01-01\n", 1, "YAML readers do not agree"),
        ("a: &x [*x]\n", 1, "an alias contains itself"),
        ("1: 2\n", 1, "a key must be text"),
        ('a: 1\nb: "\\ud800"\n', 2, "half of a surrogate pair"),
        ('a: 1\n"\\udfff": 2\n', 2, "half of a surrogate pair"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        ("[" * 100, 1, "nested too deep"),
        ("a: &m {b: 1}\nc: {<<: *m}\n", 2, "merge keys are not allowed"),
    ],
)
def test_hostile_or_ambiguous_yaml_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    assert next(p for p in check(tmp_path, text) if message in p.message).line == line


def test_an_alias_bomb_is_refused_quickly(tmp_path: Path) -> None:
    lines = ["a: &a [1,1,1,1,1,1,1,1,1,1]"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{','.join(['*' + before] * 10)}]")
    [problem] = check(tmp_path, "\n".join(lines))
    assert "more than 20000 values" in problem.message


def test_a_file_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    assert check_file(tmp_path / "none.yaml")[1][0].message == "cannot be read: No such file or directory"
    folder = check_file(tmp_path)[1][0]
    assert (folder.message, folder.hint) == (
        "cannot be read: it is a folder",
        f"a model's folder is given by `--set model.path={tmp_path}`",
    )
    os.mkfifo(pipe := tmp_path / "pipe")  # without a writer
    for file in (pipe, Path("/dev/zero")):
        assert check_file(file)[1][0].message == "cannot be read: it is no regular file"
    assert check(tmp_path, "null")[0].message == "the file is empty"
    assert check(tmp_path, "")[0].message == "the file is empty"
    assert check(tmp_path, "x" * (1 << 20) + "y")[0].message == "file too large"
    assert check(tmp_path, "- 1\n")[0].message == "a deployment file is a mapping"


def test_a_problem_reads_file_line_key_problem_got_allowed_hint(tmp_path: Path) -> None:
    [problem] = check(tmp_path, GOOD.replace("args: {}", "args: {model: {path: x, nam: z}}"))
    assert problem.render() == (
        f"{tmp_path}/deploy.yaml:5:applications[0].args.model.nam: unknown key; got 'nam'; "
        "allowed: dtype, max_model_len, name, path, quantization; did you mean name?"
    )
