"""Tunix's side of the GRPO benchmark: its GRPOLearner on the same prompts. Runs under the peer's Python.

Usage: python tunix_grpo.py JOB.json RESULT.json (see `harness.run_worker`).

Tunix is given what it needs to be right: the rotary base that it does not read itself, a pad token that is no token
of the text (its pad = eos cuts rollouts), prompts of one length that is no more than its own padding allows, and a
reference that is the base under the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
import tunix_model
from transformers import AutoTokenizer
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout import base_rollout
from vowels import share_of_vowels


class Watch:
    """Counts what each step sampled, and times it: from one batch's being asked for to the next one's."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.log = harness.StepLog()
        self.sampled: list[int] = []
        self.with_spread: list[float] = []

    def batches(self, prompts: list[str]) -> Iterator[dict[str, np.ndarray]]:
        size = self.job["prompts_per_step"]
        self.log.begin()
        for start in range(0, len(prompts), size):
            if start:
                self.log.end_step(0.0, 0, 0)
            yield {"prompts": np.array(prompts[start : start + size])}

    def reward(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        values = [share_of_vowels(text) for text in completions]
        group = self.job["group_size"]
        groups = [values[at : at + group] for at in range(0, len(values), group)]
        self.with_spread.append(sum(max(one) > min(one) for one in groups) / len(groups))
        return values

    def counting(self, generate: Any) -> Any:
        def counted(*arguments: Any, **settings: Any) -> Any:
            output = generate(*arguments, **settings)
            longest = self.job["max_new_tokens"]  # what ended early has an end token that is not returned
            self.sampled.append(sum(min(len(ids) + 1, longest) for ids in output.tokens))
            return output

        return counted


def prompts_of(job: dict[str, Any], tokenizer: Any) -> list[str]:
    lines = Path(job["prompts"]).read_text(encoding="utf-8").split("\n")
    return [
        tokenizer.apply_chat_template(
            json.loads(line)["messages"], add_generation_prompt=True, tokenize=False
        )
        for line in lines
        if line
    ]


def tokenizer_of(folder: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    idle = [token.content for number, token in tokenizer.added_tokens_decoder.items() if number not in used]
    tokenizer.pad_token = idle[-1]
    return tokenizer


def cluster(job: dict[str, Any], tokenizer: Any) -> rl_cluster.RLCluster:
    base = tunix_model.base_model(job["model"])
    policy, _ = tunix_model.with_adapter(base, job)
    mesh, length, new = tunix_model.mesh(), job["prompt_tokens"], job["max_new_tokens"]
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    return rl_cluster.RLCluster(
        actor=policy,
        reference=base,
        tokenizer=tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine="vanilla",
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=tunix_model.optimizer(job),
                eval_every_n_steps=1_000_000,
                max_steps=job["steps"],
                mini_batch_size=job["prompts_per_step"],
                train_micro_batch_size=job["micro_batch"],
                rollout_micro_batch_size=job["prompts_per_step"],
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=new,
                max_prompt_length=length,
                kv_cache_size=length + new,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                eos_tokens=[tokenizer.eos_token_id],
            ),
        ),
    )


def train(job: dict[str, Any]) -> dict[str, Any]:
    tokenizer, watch = tokenizer_of(job["model"]), Watch(job)
    prompts = prompts_of(job, tokenizer)
    made = cluster(job, tokenizer)
    made.generate = watch.counting(made.generate)
    learner = GRPOLearner(
        rl_cluster=made,
        algo_config=GRPOConfig(num_generations=job["group_size"], beta=job["beta"], epsilon=0.2),
        reward_fns=watch.reward,
    )
    learner.train(watch.batches(prompts))
    watch.log.end_step(0.0, 0, 0)
    steps = [
        {
            "seconds": step.seconds,
            "cpu_seconds": step.cpu_seconds,
            "sampled_tokens": sampled,
            "with_spread": spread,
        }
        for step, sampled, spread in zip(watch.log.steps, watch.sampled, watch.with_spread, strict=True)
    ]
    return {
        "versions": harness.versions(*tunix_model.PACKAGES),
        "settings": {"weights": "float32", "prompts a micro-batch": job["micro_batch"]},
        "steps": steps,
        "peak_resident_bytes": harness.peak_resident_bytes(),
    }


if __name__ == "__main__":
    harness.answer(train)
