"""What a resume says of options that have changed, and what config.json keeps."""

from __future__ import annotations

from megatron_snip.config import Config
from megatron_snip.train.run.run_folder import changed_options, run_id_of
from megatron_snip.train.run.state_file import config_of, read_state


def test_changed_options_are_told():
    options = Config().replace(lr=0.5, train_iters=7, log_interval=3).to_dict()
    for group, name in (("training", "lr_wsd_decay_style"), ("model", "model_name"), ("training", "lr_warmup_init")):
        del options[group][name]  # as in a checkpoint of a version that had no such option
    state = {"config": config_of(options).to_dict()}
    now = Config().replace(train_iters=9, data_path=("a",), lr_warmup_init=1, grad_reduce_in_bf16=True)
    now = now.replace(snip_target=0, snip_guard=True)
    told = ["train_iters: 7 -> 9", "lr: 0.5 -> 0.0003", "lr_warmup_init: 0.0 -> 1", "data_path: [] -> ['a']"]
    of_plans = ["precision: bf16 -> snip", "snip_target: 0.75 -> 0"]
    last = ["snip_guard: False -> True", "grad_reduce_in_bf16: False -> True"]
    assert changed_options(now, state) == [*told, *last], "options of plans change nothing without plans"
    assert changed_options(now.replace(precision="snip"), state) == [*told, *of_plans, *last]


def test_a_resume_keeps_the_run_and_tells_changed_options(train_here, tmp_path, caplog):
    run = tmp_path / "run"
    train_here(train_iters=2)
    run_id = run_id_of(run)
    with caplog.at_level("WARNING", logger="megatron_snip"):
        train_here(train_iters=3, load=str(run / "checkpoints"), lr=0.02)
    assert run_id_of(run) == run_id == read_state(run / "checkpoints", 3)["run_id"]
    told = [record.getMessage().split("option, ")[1] for record in caplog.records if "changed" in record.getMessage()]
    assert told == ["train_iters: 2 -> 3", "lr: 0.01 -> 0.02"]
    before = (run / "config.json").read_bytes()
    train_here(train_iters=1, load=str(run / "checkpoints"), precision="fp8")
    assert (run / "config.json").read_bytes() == before, "the options of the iterations that ran"
