/** What is said into the microphone, as text of the next message: recorded here, and transcribed by the chat's model. */
import * as api from "../common/api.js";
import { announce, byId, h } from "../common/dom.js";

const SAMPLE_RATE = 16_000;
const MOST_S = 300;

export class Microphone {
  #button = byId("record");
  /** @type {MediaRecorder | null} */
  #recorder = null;

  /** @param {() => string} model  the chat's @param {(text: string) => void} take  what is to happen with the text */
  constructor(model, take) {
    this.#button.onclick = async () => {
      if (this.#recorder) return this.#recorder.stop();
      byId("picture-error").replaceChildren();
      try {
        const sound = await this.#recorded();
        const body = new FormData();
        body.append("model", model());
        body.append("file", wav(await samples(sound)), "recording.wav");
        announce("Transcribing");
        take((await (await api.ask("v1/audio/transcriptions", { body })).json()).text);
      } catch (error) {
        const textContent = error instanceof Error ? error.message : "The microphone cannot be used.";
        byId("picture-error").replaceChildren(h("p", { className: "error", role: "alert", textContent }));
      }
    };
  }

  /** Whether the model hears. A page without TLS has no microphone, except on the own machine. */
  set enabled(/** @type {boolean} */ value) {
    this.#button.hidden = !value || !navigator.mediaDevices;
  }

  /** Records until the button is pressed again. @returns {Promise<Blob>} */
  async #recorded() {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    const recorder = new MediaRecorder(stream);
    /** @type {Blob[]} */
    const pieces = [];
    const timer = setTimeout(() => recorder.stop(), MOST_S * 1000);
    this.#show(recorder);
    try {
      await new Promise((resolve, reject) => {
        recorder.ondataavailable = (event) => pieces.push(event.data);
        recorder.onstop = resolve;
        recorder.onerror = () => reject(new Error("The recording failed."));
        recorder.start();
      });
    } finally {
      clearTimeout(timer);
      this.#show(null);
      for (const track of stream.getTracks()) track.stop();
    }
    return new Blob(pieces);
  }

  /** @param {MediaRecorder | null} recorder */
  #show(recorder) {
    this.#recorder = recorder;
    this.#button.setAttribute("aria-pressed", String(recorder !== null));
    announce(recorder ? "Recording" : "Recorded");
  }
}

/** One channel, at the rate that models hear. @param {Blob} sound @returns {Promise<Float32Array>} */
async function samples(sound) {
  const context = new AudioContext({ sampleRate: SAMPLE_RATE });
  try {
    return (await context.decodeAudioData(await sound.arrayBuffer())).getChannelData(0);
  } finally {
    await context.close();
  }
}

/** A file of 16-bit samples. Source: RFC 2361 and Microsoft's "RIFF". @param {Float32Array} heard @returns {Blob} */
function wav(heard) {
  const head = new DataView(new ArrayBuffer(44));
  const n = heard.length * 2;
  for (const [at, word] of /** @type {[number, string][]} */ ([[0, "RIFF"], [8, "WAVE"], [12, "fmt "], [36, "data"]]))
    for (let i = 0; i < 4; i++) head.setUint8(at + i, word.charCodeAt(i));
  for (const [at, value] of [[4, 36 + n], [16, 16], [24, SAMPLE_RATE], [28, 2 * SAMPLE_RATE], [40, n]]) head.setUint32(at, value, true);
  for (const [at, value] of [[20, 1], [22, 1], [32, 2], [34, 16]]) head.setUint16(at, value, true);
  const written = Int16Array.from(heard, (one) => Math.round(Math.max(-1, Math.min(1, one)) * 32767));
  return new Blob([head, written], { type: "audio/wav" });
}
