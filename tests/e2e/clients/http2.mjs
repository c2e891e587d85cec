// node http2.mjs URL BODY [CA]: two streams on one connection. The first is reset at its first event, the second, a
// short one, is read to its end. Prints what became of them.
import http2 from "node:http2";
import fs from "node:fs";

const [url, body, ca] = process.argv.slice(2);
const session = http2.connect(url, ca ? { ca: fs.readFileSync(ca) } : {});
const head = { ":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json" };

const short = JSON.stringify({ ...JSON.parse(body), max_tokens: 40 });

function ask(body, onData) {
  return new Promise((resolve, reject) => {
    const stream = session.request(head);
    const told = { status: 0, text: "", code: 0 };
    stream.setEncoding("utf8");
    stream.on("response", (headers) => { told.status = headers[":status"]; });
    stream.on("data", (chunk) => { told.text += chunk; onData(stream); });
    stream.on("error", reject);
    stream.on("close", () => { told.code = stream.rstCode; resolve(told); });
    stream.end(body);
  });
}

const reset = ask(body, (stream) => stream.close(http2.constants.NGHTTP2_CANCEL));
const whole = ask(short, () => {});
console.log(JSON.stringify({ reset: await reset, whole: await whole, protocol: session.alpnProtocol }));
session.close();
