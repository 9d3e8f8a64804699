"""`tandem chat` against a fake server: through a pipe, at a terminal, stopped in the middle."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from cluster.cli.conversation import Conversation, Leave, stats_text
from cluster.cli.sse import AnswerStats, ChatClient
from cluster.cli.terminal import CommandFailed
from tests.unit.cluster.conftest import World
from tests.unit.cluster.fakes import FakeServer


def test_a_pipe_is_one_message_and_the_answer_is_all_there_is(world: World) -> None:
    done = world.run("chat", "--url", world.server.url, input="hi\nthere\n")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "Paris. Yes\n", "")
    assert world.server.chats == [
        {
            "model": "Fake",
            "messages": [{"role": "user", "content": "hi\nthere"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_bytes_that_are_no_text_become_replacement_characters(world: World) -> None:
    done = world.run("chat", "--url", world.server.url, input=b"\xff\xfe\nhi\n")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "Paris. Yes\n", "")
    (chat,) = world.server.chats
    assert chat["messages"] == [{"role": "user", "content": "\ufffd\ufffd\nhi"}]


def test_commands_in_a_pipe_stand_between_messages(world: World) -> None:
    text = "/system Be short.\n/set temperature 0.2\nfirst\n/usr/bin is a folder\n"
    text += "/reset\n/stats\nsecond\n/exit\nthird"
    done = world.run("chat", "--url", world.server.url, input=text)
    assert (done.exit_code, done.stdout) == (0, "Paris. Yes\nParis. Yes\n")
    system = {"role": "system", "content": "Be short."}
    assert [chat["messages"] for chat in world.server.chats] == [
        [system, {"role": "user", "content": "first\n/usr/bin is a folder"}],
        [system, {"role": "user", "content": "second"}],
    ]
    assert [chat["temperature"] for chat in world.server.chats] == [0.2, 0.2]
    assert "prompt 20 tokens, 16 of them cached" in done.stderr


def test_the_conversation_goes_on_with_what_was_answered(world: World) -> None:
    world.run("chat", "--url", world.server.url, input="first\n/stats\nsecond")
    assert world.server.chats[1]["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "Paris. Yes"},
        {"role": "user", "content": "second"},
    ]


def test_options_set_the_start(world: World) -> None:
    arguments = ("--url", world.server.url + "/v1", "--model", "Fake", "--system", "S")
    done = world.run("chat", *arguments, "--set", "max_tokens=5", "--json", input="hi")
    assert world.server.chats[0]["max_tokens"] == 5
    assert world.server.chats[0]["messages"][0] == {"role": "system", "content": "S"}
    answer = json.loads(done.stdout)
    assert (answer["answer"], answer["completion_tokens"], answer["cached_tokens"]) == ("Paris. Yes", 3, 16)
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "Other"), "does not serve 'Other'; it serves Fake"),
        (("--set", "temprature=1"), "no setting temprature; did you mean temperature?"),
        (("--set", "top_k=many"), "top_k takes a value of type int, not 'many'"),
    ],
)
def test_wrong_options_are_refused(world: World, arguments: tuple[str, str], said: str) -> None:
    done = world.run("chat", "--url", world.server.url, *arguments, input="hi")
    assert (done.exit_code, world.server.chats) == (2 if "--set" in arguments else 1, [])
    assert said in done.stderr


def test_no_server_says_how_to_start_one(world: World) -> None:
    done = world.run("chat", "--url", "http://127.0.0.1:1", input="hi")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: nothing answers at http://127.0.0.1:1 (")
    assert "start it with `tandem serve`, or give --url" in done.stderr


def test_a_refusal_is_told_in_the_server_s_words(world: World) -> None:
    world.server.chat_status = 503
    done = world.run("chat", "--url", world.server.url, input="hi")
    assert done.exit_code == 1
    assert done.stderr == "error: the server has no room (status 503, retry after 3 s)\n"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("", "the answer ended before it was complete"),
        ('data: {"error": {"message": "the group died"}}\n\n', "the group died"),
        ("data: {\n\n", "the server sent what is not JSON"),
    ],
)
def test_a_broken_stream_is_an_error_after_what_came(world: World, end: str, said: str) -> None:
    world.server.stream_end = end
    done = world.run("chat", "--url", world.server.url, input="hi")
    assert (done.exit_code, done.stdout) == (1, "Paris. Yes\n")
    assert said in done.stderr


def test_text_cannot_steer_the_terminal_and_odd_line_ends_do_not_split_it(world: World) -> None:
    world.server.pieces = ["a\x1b[31mb", "\u2028c\x85", "d\te\n"]
    done = world.run("chat", "--url", world.server.url, input="hi")
    assert done.stdout == "a[31mb\u2028cd\te\n\n"


def test_a_piped_message_keeps_its_odd_line_ends(world: World) -> None:
    world.run("chat", "--url", world.server.url, input="a\u2028b\x0cc\nd")
    assert world.server.chats[-1]["messages"] == [{"role": "user", "content": "a\u2028b\x0cc\nd"}]


def test_closing_a_stream_leaves_the_server() -> None:
    with FakeServer().running() as server:
        server.pause.clear()
        client = ChatClient(server.url)
        stats = AnswerStats()
        stream = client.stream("Fake", [{"role": "user", "content": "hi"}], {}, stats)
        assert next(stream) == "Paris"
        stream.close()
        assert server.client_left.wait(timeout=10)
        assert stats.total_s > 0
        client.close()


def test_the_numbers_of_an_answer() -> None:
    stats = AnswerStats(
        ttft_s=0.05,
        total_s=1.05,
        prompt_tokens=20,
        cached_tokens=16,
        completion_tokens=11,
        finish_reason="stop",
    )
    assert stats_text(stats) == (
        "first token after 50 ms, 11 tokens, 10.0 tokens/s, prompt 20 tokens, 16 of them cached, ended: stop"
    )
    assert stats_text(None) == "no answer yet"
    assert stats_text(AnswerStats()) == "ended: stopped by you"


def test_commands_at_the_terminal(tmp_path: Path) -> None:
    talk = Conversation(model="Fake")
    talk.turns.append({"role": "user", "content": "hi"})
    file = tmp_path / "talk.json"
    assert talk.run(f"/save {file}") == f"saved 1 message to {file}"
    assert json.loads(file.read_text()) == {
        "model": "Fake",
        "settings": {},
        "messages": [{"role": "user", "content": "hi"}],
    }
    assert talk.run(f"/save {file}") == f"{file} exists; choose another name"
    assert talk.run("/save") == "give a file name: /save talk.json"
    assert talk.run("/set top_p 0.9") == "top_p 0.9"
    assert talk.run("/set") == "top_p 0.9"
    assert talk.run("/set top_p nan") == "top_p takes a finite number, not 'nan'"
    assert talk.run("/set top_p x") == "top_p takes a value of type float, not 'x'"
    assert talk.run("/set top_p") == "top_p is the server's again"
    assert talk.run("/set temprature 1") == "no setting temprature; did you mean temperature?"
    assert talk.run("/sytem x") == "no command /sytem; did you mean /system?"
    assert talk.run("/reset") == "forgotten"
    assert talk.messages() == []
    assert talk.run("/system Be short.") == "system prompt set, conversation started over"
    assert talk.run("/system") == "Be short."
    with pytest.raises(Leave):
        talk.run("/exit")


def test_a_refused_question_is_not_part_of_the_conversation(world: World) -> None:
    world.server.chat_status = 503
    client = ChatClient(world.server.url)
    with pytest.raises(CommandFailed, match="no room"):
        list(client.stream("Fake", [], {}, AnswerStats()))
    client.close()


class Person:
    """Someone at a terminal of their own, in front of a real `tandem chat` process."""

    def __init__(self, url: str, home: Path) -> None:
        self.seen = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.environ["HOME"] = str(home)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests run in the background
            program = "from cluster.cli import main; main()"
            os.execv(sys.executable, [sys.executable, "-c", program, "chat", "--url", url])

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, text: str) -> None:
        """Read until the text has come; it is then forgotten with all before it."""
        deadline = time.monotonic() + 60
        while text not in self.seen:
            left_s = max(0.0, deadline - time.monotonic())
            is_readable = bool(select.select([self._terminal], [], [], left_s)[0])
            assert is_readable, f"{text!r} did not come, only {self.seen!r}"
            self.seen += os.read(self._terminal, 4096).decode()
        self.seen = self.seen.partition(text)[2]

    def exit_code(self) -> int:
        try:
            while os.read(self._terminal, 4096):
                pass
        except OSError:  # the other side is closed
            pass
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_at_a_terminal_ctrl_c_stops_only_the_answer(tmp_path: Path) -> None:
    with FakeServer().running() as server:
        server.pause.clear()
        person = Person(server.url, tmp_path)
        try:
            person.wait_for("/help for commands")
            person.wait_for("> ")
            person.type("capital of France?\n")
            person.wait_for("Paris")
            person.type("\x03")
            person.wait_for("[stopped]")
            person.wait_for("> ")
            assert server.client_left.wait(timeout=10)
            server.pause.set()
            person.type('"""two\nlines"""\n')
            person.wait_for("Paris. Yes")
            person.type("/stats\n")
            person.wait_for("16 of them cached")
            person.wait_for("> ")
            time.sleep(0.5)  # between the prompt and readline's wait, a signal waits for the next key
            person.type("\x03")
            person.wait_for("Ctrl-D leaves")
            person.wait_for("> ")
            person.type("\x04")
            assert person.exit_code() == 0
        except BaseException:
            os.kill(person.pid, signal.SIGKILL)
            raise
        assert server.chats[1]["messages"] == [
            {"role": "user", "content": "capital of France?"},
            {"role": "assistant", "content": "Paris"},
            {"role": "user", "content": "two\nlines"},
        ]
