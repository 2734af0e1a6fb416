"""Write chats in the formats of LLaMA-Factory (``tiny.json``, ``dataset_info.json``) and ms-swift (``tiny.jsonl``)."""

import json
import random
import sys
from pathlib import Path

folder = Path(sys.argv[1])
folder.mkdir()
random.seed(0)
WORDS = ["the", "cat", "dog", "bird", "sat", "ran", "flew", "on", "under", "a", "mat", "tree", "house", "quickly"]
pairs = [(" ".join(random.choices(WORDS, k=6)), " ".join(random.choices(WORDS, k=6))) for _ in range(16)]
rows = [{"instruction": asked, "input": "", "output": said} for asked, said in pairs]
(folder / "tiny.json").write_text(json.dumps(rows))
(folder / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.json"}}))
chats = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in pairs]
(folder / "tiny.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
