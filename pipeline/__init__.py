"""The stages of dvc.yaml, one thin script each, and where their files live."""

from pathlib import Path

ROOT = Path.cwd()
CONFIG = Path("build/config.yaml")
TARGET = Path("build/target.json")
PROMPTS = Path("build/prompts.json")
DEVICE = Path("build/device.json")
CHAMPION = Path("build/champion.json")
INCUMBENT = Path("build/incumbent.json")
START = Path("build/start.json")
CORPUS = Path("data/corpus")
TARGETS = Path("models/targets")
DRAFTS = Path("models/drafts")
CHAMPIONS = Path("models/champions")
PARTIAL = Path("build/partial")
REPORTS = Path("reports")
