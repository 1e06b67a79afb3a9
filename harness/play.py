"""Show what a run has learned: `python -m harness.play <run dir>` renders its newest checkpoint."""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from PIL import Image
from torch import nn

from harness.config.plan import to_config
from harness.config.stored import add_import_flags, trusted_options
from harness.environments.evaluate import play
from harness.environments.factory import EnvFactory, single
from harness.errors import installing
from harness.files import one_line, write_atomic
from harness.numbers import readable
from harness.options.run import Config
from harness.run.build import make_learner
from harness.run.checkpoints import CheckpointError, Checkpoints
from harness.run_directory import RunDir

WIDTH = 480  # pixels; wider pictures are made smaller, so that a GIF stays one that can be sent
FPS = 30  # of environments that do not say
PIP = re.compile(r"`pip install ([^`]+)`")  # a hint of gymnasium


class CannotPlay(RuntimeError):
    """What was asked for cannot be shown; the text says why, in one line."""


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says; the exit status."""
    parser = argparse.ArgumentParser(prog="lockstep play", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="a run's directory")
    parser.add_argument("--out", type=Path, help="the .gif to write; <run dir>/play.gif")
    parser.add_argument("--episodes", type=int, default=1, help="how many, one after another")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode")
    parser.add_argument(
        "--max-steps", type=int, default=5000, help="end an episode after this many steps; 5000"
    )
    add_import_flags(parser)
    options = parser.parse_args(arguments)
    out = options.out or options.run_dir / "play.gif"
    try:
        check_format(out)
        for name in ("episodes", "max_steps"):
            if getattr(options, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is {getattr(options, name)}, expected 1 or more")
        config, policy, frames = load(
            options.run_dir, import_env=options.import_env, plugins=options.plugin
        )
        film, fps = perform(
            config,
            policy,
            episodes=options.episodes,
            seed=options.seed,
            max_steps=options.max_steps,
        )
        write(film, out, fps)
    except (CannotPlay, ValueError, OSError, CheckpointError) as error:
        print(f"play: {one_line(error)}", file=sys.stderr)
        return 2
    print(f"{out}: the policy after {frames} frames, {len(film)} pictures at {fps} a second")
    return 0


def load(
    run_dir: Path, *, import_env: bool = False, plugins: Sequence[str] = ()
) -> tuple[Config, nn.Module, int]:
    """A run's config, its policy by the newest checkpoint, and after how many frames that was."""
    options = trusted_options(run_dir, import_env=import_env, plugins=plugins)
    options["device"] = "cpu"  # wherever it was trained
    if isinstance(collector := options.get("collector"), dict):
        for key in ("devices", "cudagraph_policy"):
            collector.pop(key, None)
    config = to_config(options)
    run_id = RunDir(run_dir).read_id()
    frames, state = Checkpoints(run_dir / "checkpoints", run=run_id).load()
    policy = make_learner(config).policy
    try:
        policy.load_state_dict(state["learner"]["algorithm"]["policy"])
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CannotPlay(f"the checkpoint in {run_dir} does not fit its config: {what}") from error
    return config, policy, frames


def perform(
    config: Config, policy: nn.Module, *, episodes: int, seed: int, max_steps: int
) -> tuple[list[Image.Image], int]:
    """Play, and say how it went: the pictures, and how many a second the environment wants."""
    film: list[Image.Image] = []
    env = EnvFactory(single(config.env), "rgb_array", tuple(config.plugins))()
    assert isinstance(env, gym.Env)
    with closing(env):
        for number in range(episodes):
            try:
                (episode,) = play(
                    policy, [env], [seed + number], max_steps=max_steps, see=film_with(film)
                ).episodes
            except gym.error.DependencyNotInstalled as error:
                reason = PIP.sub(lambda hint: f"`{installing(hint[1])}`", str(error))
                raise CannotPlay(f"{config.env.id} cannot be rendered: {reason}") from error
            cut = "" if episode.ended else ", where it was cut"
            total = readable(episode.total, 6)
            print(f"episode {number}: return {total} in {episode.length:,} steps{cut}")
        return film, int(env.metadata.get("render_fps") or FPS)


def film_with(film: list[Image.Image]) -> Callable[[gym.Env], None]:
    """A camera: it adds what an environment shows to `film`."""
    return lambda env: film.append(look(env))


def look(env: gym.Env) -> Image.Image:
    """What the environment shows now, no wider than `WIDTH`."""
    shown: Any = env.render()
    if not isinstance(shown, np.ndarray):
        raise CannotPlay(f"{env} shows no picture: render() returned {type(shown).__name__}")
    picture = Image.fromarray(shown)
    if picture.width > WIDTH:
        picture = picture.resize((WIDTH, picture.height * WIDTH // picture.width))
    return picture


def check_format(out: Path) -> None:
    """Raise, before anything is played, if no such file can be written."""
    if out.suffix != ".gif":
        raise CannotPlay(f"--out is {out}, expected a name that ends in .gif")


def write(film: list[Image.Image], out: Path, fps: int) -> None:
    """Write the pictures as a GIF."""
    first, *others = film
    # A GIF counts in hundredths of a second, and players slow down what is under two.
    duration_ms = max(20, round(100 / fps) * 10)
    content = io.BytesIO()
    first.save(content, "GIF", save_all=True, append_images=others, duration=duration_ms, loop=0)
    write_atomic(out, content.getvalue())


if __name__ == "__main__":
    sys.exit(main())
