"""Write chats and ranked pairs in the formats of LLaMA-Factory (``.json``) and ms-swift (``.jsonl``)."""

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
ranked = [{**row, "chosen": row["output"], "rejected": " ".join(random.choices(WORDS, k=6))} for row in rows]
(folder / "pairs.json").write_text(json.dumps(ranked))
columns = {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}
about = {"tiny": {"file_name": "tiny.json"}, "pairs": {"file_name": "pairs.json", "ranking": True, "columns": columns}}
(folder / "dataset_info.json").write_text(json.dumps(about))
chats = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in pairs]
(folder / "tiny.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
