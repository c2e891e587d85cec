// node fetch.mjs URL BODY: one stream is aborted at its first event, another, a short one, is read to its end. Prints
// what became of them.
const [url, body] = process.argv.slice(2);

const short = JSON.stringify({ ...JSON.parse(body), max_tokens: 40 });

async function ask(body, onData) {
  const controller = new AbortController();
  const told = { status: 0, text: "", error: null };
  try {
    const response = await fetch(`${url}/v1/chat/completions`, {
      method: "POST", headers: { "content-type": "application/json" }, body, signal: controller.signal,
    });
    told.status = response.status;
    for await (const chunk of response.body.pipeThrough(new TextDecoderStream())) {
      told.text += chunk;
      onData(controller);
    }
  } catch (error) {
    told.error = error.name;
  }
  return told;
}

const aborted = ask(body, (controller) => controller.abort());
const whole = ask(short, () => {});
console.log(JSON.stringify({ aborted: await aborted, whole: await whole }));
