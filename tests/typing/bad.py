"""Programs that are wrong: a type checker says so in each line that is marked, and in no other."""

from windlass import App, Context, Handle

app = App("memory:")


@app.task
async def resize(image: str, width: int = 100) -> dict[str, int]:
    return {"width": width}


@app.task(queue="mail")
def send(ctx: Context, to: str) -> None: ...


async def use() -> None:
    await resize.enqueue()  # wrong
    await resize.enqueue(5)  # wrong
    await resize.enqueue("a.png", height=3)  # wrong
    await resize.options(priority="low").enqueue("a.png", width="wide")  # wrong
    resize.enqueue_sync(image=None)  # wrong
    resize.call("a.png", "wide")  # wrong
    send.enqueue_sync(to=5)  # wrong
    await send.enqueue("a@example.com", "b@example.com")  # wrong
    await app.enqueue_many([resize])  # wrong
    handle: Handle = await resize("a.png")  # wrong
    number: int = (await resize.enqueue("a.png")).id  # wrong
    await app.enqueue(resize, {})  # wrong
    await app.enqueue("resize", {}, priorty=3)  # wrong
    await resize.options(priorty=3).enqueue("a.png")  # wrong
    await resize.options(delay="x").enqueue("a.png")  # wrong
    app.task(retry="x")  # wrong
    app.task(que="mail")  # wrong
    send("a@example.com")  # wrong
    (await resize.enqueue("a.png")).change_sync(priorty=3)  # wrong
    print(handle, number)
