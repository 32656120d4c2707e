// What a hostile page does with every [method, url] of `requests`: returns how much it tried and what it could read.
async (requests) => {
  const readable = [];
  const body = '{"model": "m", "messages": [], "paused": true, "value": 1, "session_id": "s", "version": "m@0", "why": ""}';
  const attempt = async (what, url, options) => {
    try {
      const answer = await fetch(url, {...options, signal: AbortSignal.timeout(4000)});
      if (answer.type !== "opaque" && answer.type !== "opaqueredirect" && answer.status < 400)
        readable.push(`${what} ${url} ${answer.status}`);
    } catch (error) {}
  };
  const kinds = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"];
  const tries = [];
  for (const [method, url] of requests) {
    const hasBody = !["GET", "HEAD"].includes(method);
    tries.push(() => attempt("cors", url, {method, mode: "cors", ...(hasBody ? {body, headers: {"content-type": "application/json"}} : {})}));
    tries.push(() => attempt("same-origin", url, {method, mode: "cors", credentials: "include"}));
    if (["GET", "HEAD", "POST"].includes(method)) {
      tries.push(() => attempt("no-cors", url, {method, mode: "no-cors"}));
      if (method === "POST") {
        for (const kind of kinds) tries.push(() => attempt(`no-cors ${kind}`, url, {method, mode: "no-cors", body, headers: {"content-type": kind}}));
        tries.push(() => attempt("no-cors blob", url, {method, mode: "no-cors", body: new Blob([body])}));
        tries.push(async () => navigator.sendBeacon(url, new Blob([body], {type: "text/plain"})));
        for (const kind of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]) tries.push(async () => {
          const frame = document.createElement("iframe"); frame.name = "f" + Math.random(); document.body.append(frame);
          const form = document.createElement("form"); form.method = "post"; form.action = url; form.enctype = kind; form.target = frame.name;
          const field = document.createElement("input"); field.name = body.slice(0, -1) + ', "x": "'; field.value = '"}';
          form.append(field); document.body.append(form); form.submit();
          await new Promise((done) => { frame.onload = done; setTimeout(done, 1500); });
          try { if (frame.contentDocument && frame.contentDocument.body.innerText.length > 1 && !frame.contentDocument.body.innerText.includes('"error"')) readable.push(`form ${url}`); } catch (error) {}
          frame.remove();
        });
      }
    }
    if (method === "GET") {
      for (const tag of ["img", "script", "iframe"]) tries.push(() => new Promise((done) => {
        const element = document.createElement(tag); element.onload = element.onerror = done; setTimeout(done, 1500);
        element.src = url; document.body.append(element);
      }));
      tries.push(() => new Promise((done) => {
        const socket = new WebSocket(url.replace("http", "ws")); setTimeout(done, 1500);
        socket.onopen = () => { readable.push(`websocket ${url}`); done(); }; socket.onerror = done;
      }));
    }
  }
  let next = 0;
  const worker = async () => { while (next < tries.length) await tries[next++](); };
  await Promise.all(Array.from({length: 12}, worker));
  return {tried: tries.length, readable};
}
