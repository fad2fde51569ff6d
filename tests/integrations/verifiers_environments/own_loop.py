"""`python own_loop.py '[[ENVIRONMENT, ARGUMENTS, ROWS], ...]'`: rewards and metrics of the library's own loop, as JSON.

The model is a server in this process (`scripted_model`).
"""

import asyncio
import http.server
import importlib.metadata
import itertools
import json
import os
import re
import sys
import threading

import scripted_model


class Model(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        messages = body["messages"]
        text = json.dumps([m.get("content") for m in messages]) + json.dumps(body.get("tools") or [])
        turns = sum(m["role"] == "assistant" for m in messages)
        message = {"role": "assistant", "content": scripted_model.reply(text, turns)}
        if called := re.fullmatch(r"<tool_call>(.*)</tool_call>", message["content"]):
            call = json.loads(called[1])
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            message = {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            }
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        kind, data = "application/json", json.dumps(answer).encode()
        if body.get("stream"):
            for call in message.get("tool_calls", []):
                call["index"] = 0
            chunk = {**answer, "object": "chat.completion.chunk", "choices": [{**choice, "delta": message}]}
            kind, data = "text/event-stream", f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


async def classic(url, environment, arguments, rows):
    import verifiers

    os.environ["NO_KEY"] = "x"
    loaded = verifiers.load_environment(environment, **arguments)
    client = verifiers.ClientConfig(api_base_url=url, api_key_var="NO_KEY", max_retries=0)
    found = await loaded.generate([dict(loaded.get_dataset()[row]) for row in rows], client, "m", {})
    return [{"reward": output["reward"], "metrics": output["metrics"]} for output in found["outputs"]]


async def v1(url, environment, arguments, rows):
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    loaded = load_environment(resolve_env_config({**arguments, "taskset": {"id": environment}}))
    tasks = list(itertools.islice(loaded.taskset, max(rows) + 1))
    context = vf.ModelContext(model="m", client=vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY"))
    answers = []
    async with loaded.serving():
        for row in rows:
            [slot] = loaded.slots(tasks[row])
            [trace] = (await loaded.run_slot(slot, context)).traces
            scores = {name: reward.score for name, reward in trace.rewards.items()}
            assert trace.ok, trace.errors
            answers.append({"reward": trace.reward, "metrics": {**scores, **trace.metrics}})
    return answers


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    loop = classic if importlib.metadata.version("verifiers").startswith("0.1.") else v1
    url = f"http://127.0.0.1:{server.server_port}/v1"
    answers = [asyncio.run(loop(url, *asked)) for asked in json.loads(sys.argv[1])]
    out.write(json.dumps(answers) + "\n")
    out.flush()
    os._exit(0)
